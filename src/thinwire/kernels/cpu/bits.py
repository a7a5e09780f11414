"""Bit fields: codes of 1 to 16 bits packed into bytes, lowest bit first, and fields of any width."""

from typing import Any

import numpy as np

from .jit import kernel


@kernel
def pack(codes: Any, bits: int, out: Any) -> None:
    """Pack codes of 1, 2, 4, 8 or 16 bits into `out`. The bits after the last code become zero."""
    if bits == 16:
        for i in range(codes.size):
            out[2 * i] = codes[i] & 0xFF
            out[2 * i + 1] = codes[i] >> 8
    elif bits == 8:
        for i in range(codes.size):
            out[i] = codes[i]
    elif bits == 4:
        for i in range(codes.size // 2):
            out[i] = codes[2 * i] | codes[2 * i + 1] << 4
    elif bits == 2:
        for i in range(codes.size // 4):
            out[i] = codes[4 * i] | codes[4 * i + 1] << 2 | codes[4 * i + 2] << 4 | codes[4 * i + 3] << 6
    else:
        for i in range(codes.size // 8):
            low = codes[8 * i] | codes[8 * i + 1] << 1 | codes[8 * i + 2] << 2 | codes[8 * i + 3] << 3
            high = codes[8 * i + 4] | codes[8 * i + 5] << 1 | codes[8 * i + 6] << 2 | codes[8 * i + 7] << 3
            out[i] = low | high << 4
    if bits < 8:
        per_byte = 8 // bits
        done = codes.size // per_byte * per_byte
        if done < codes.size:
            byte = 0
            for i in range(done, codes.size):
                byte |= codes[i] << (i - done) * bits
            out[done // per_byte] = byte


@kernel
def unpack(data: Any, bits: int, codes: Any) -> None:
    """Unpack codes of 1, 2 or 4 bits until `codes` is full; the inverse of `pack`."""
    per_byte = 8 // bits
    mask = np.uint8((1 << bits) - 1)
    whole = codes.size // per_byte
    if bits == 4:
        for i in range(whole):
            for j in range(2):
                codes[2 * i + j] = data[i] >> np.uint8(4 * j) & mask
    elif bits == 2:
        for i in range(whole):
            for j in range(4):
                codes[4 * i + j] = data[i] >> np.uint8(2 * j) & mask
    else:
        for i in range(whole):
            for j in range(8):
                codes[8 * i + j] = data[i] >> np.uint8(j) & mask
    for i in range(whole * per_byte, codes.size):
        codes[i] = data[whole] >> np.uint8((i - whole * per_byte) * bits) & mask


@kernel
def pack_low_bits(values: Any, width: int, out: Any) -> None:
    """Pack the lowest `width` bits of each value, one field after the other."""
    mask = (1 << width) - 1
    waiting, filled, byte = 0, 0, 0
    for j in range(values.size):
        waiting |= (values[j] & mask) << filled
        filled += width
        while filled >= 8:
            out[byte] = waiting & 0xFF
            waiting >>= 8
            filled -= 8
            byte += 1
    if filled > 0:
        out[byte] = waiting
