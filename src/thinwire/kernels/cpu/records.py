"""One TopK record: k positions and values to bytes and back (`TopKRecord`; 84 bytes for 64 of 4,096 in 2 bits)."""

from typing import Any

import numpy as np

from .bits import pack, pack_low_bits
from .jit import (
    cut_bfloat16,
    from_bfloat16,
    kernel,
    lowest_one,
    nearest_integer,
    prefetch_now,
    read_bfloat16,
    read_field,
    sign_of,
    summing_kernel,
    write_bfloat16,
)


@kernel
def write_record(positions: Any, values: Any, record: Any, codes: Any, out: Any) -> None:
    """Write positions[:k], ascending, and values[:k] to out[:nbytes]. `codes` is scratch for k integers."""
    k, low_bits = record.k, record.low_bits
    if record.bits == 32:
        write_floats(values, out)
    else:
        write_codes(values, record.bits, codes[:k], out)
        pack(codes[:k], record.bits, out[record.codes_at : record.low_at])
    pack_low_bits(positions[:k], low_bits, out[record.low_at : record.high_at])
    bitmap = out[record.high_at : record.nbytes]
    bitmap[:] = 0
    for j in range(k):
        high = (positions[j] >> low_bits) + j
        bitmap[high >> 3] |= 1 << (high & 7)


@kernel
def write_floats(values: Any, out: Any) -> None:
    """Write the values to `out` as little-endian float32."""
    for j in range(values.size):
        raw = np.float32(values[j]).view(np.uint32)
        for byte in range(4):
            out[4 * j + byte] = (raw >> np.uint32(8 * byte)) & np.uint32(0xFF)


@kernel
def write_codes(values: Any, bits: int, codes: Any, out: Any) -> None:
    """Write the scales to `out` and the codes of the values to `codes`, as `reference.topk.quantize` defines them."""
    number = values.dtype.type
    top, sign = number((1 << (bits - 1)) - 1), 1 << (bits - 1)
    if bits > 2:
        smallest, biggest = extremes(values)
        low = cut_bfloat16(smallest)
        low_value = from_bfloat16(low)
        step = cut_bfloat16((number(biggest) - number(low_value)) / top)
        inverse = number(1) / number(from_bfloat16(step)) if step > 0 else number(0)
        for j in range(codes.size):
            share = max(abs(values[j]) - low_value, number(0)) * inverse
            codes[j] = nearest_integer(min(share, top)) | (sign_of(values[j]) & sign)
        write_bfloat16(out, 2, step)
    else:
        low = cut_bfloat16(sum_from(values, number(0))[0] / values.size)
        if bits == 1:
            for j in range(codes.size):
                codes[j] = sign_of(values[j]) & sign
        else:
            split = number(from_bfloat16(low))
            total, count = sum_from(values, split)
            low = cut_bfloat16(sum_below(values, split) / max(values.size - count, 1))
            rise = total / max(count, 1) - np.float64(from_bfloat16(low))
            for j in range(codes.size):
                codes[j] = np.int32(abs(values[j]) >= split) | (sign_of(values[j]) & sign)
            write_bfloat16(out, 2, cut_bfloat16(max(rise, 0.0)))
    write_bfloat16(out, 0, low)


@kernel
def extremes(values: Any) -> Any:
    """Return the smallest and the largest magnitude."""
    smallest, biggest = np.float64(np.inf), np.float64(0)
    for j in range(values.size):
        magnitude = np.float64(abs(values[j]))
        smallest, biggest = min(smallest, magnitude), max(biggest, magnitude)
    return smallest, biggest


@summing_kernel
def sum_from(values: Any, split: Any) -> Any:
    """Return the sum, in float64, and the number of the magnitudes >= `split`."""
    total, count = 0.0, np.int32(0)
    number = values.dtype.type
    for j in range(values.size):
        magnitude = abs(values[j])
        total += np.float64(magnitude if magnitude >= split else number(0))
        count = np.int32(count + np.int32(magnitude >= split))
    return total, count


@summing_kernel
def sum_below(values: Any, split: Any) -> float:
    """Return the sum, in float64, of the magnitudes below `split`."""
    total = 0.0
    number = values.dtype.type
    for j in range(values.size):
        magnitude = abs(values[j])
        total += np.float64(magnitude if magnitude < split else number(0))
    return total


@kernel
def read_record(data: Any, record: Any, positions: Any, values: Any, out: Any) -> int:
    """Read positions and values of a record. Return their number: k, or fewer if bytes are damaged.

    The elements of `out` at these positions are prefetched, because they are too scattered for the hardware to foresee.
    """
    if data.size < 8:  # of a very small tensor: `read_field` needs eight bytes
        padded = np.zeros(8, np.uint8)
        padded[: data.size] = data
        data = padded
    low_bits, bits = record.low_bits, record.bits
    j, nbytes = 0, record.nbytes - record.high_at
    for byte in range(0, nbytes, 7):
        ones = np.uint64(read_field(data, record.high_at + byte, 0, 8 * min(7, nbytes - byte)))
        while ones != np.uint64(0) and j < record.k:
            high = 8 * byte + lowest_one(ones) - j
            ones &= ones - np.uint64(1)
            position = high << low_bits | read_field(data, record.low_at, j * low_bits, low_bits)
            prefetch_now(out, position)
            positions[np.uintp(j)] = position
            j += 1
    if bits == 32:
        for i in range(j):
            values[i] = np.uint32(read_field(data, 0, 32 * i, 32)).view(np.float32)
        return j
    low = read_bfloat16(data, 0)
    step = read_bfloat16(data, 2) if bits > 1 else np.float32(0)
    index_mask = (1 << (bits - 1)) - 1
    for i in range(j):
        code = read_field(data, record.codes_at, i * bits, bits)
        level = low + np.float32(np.int32(code & index_mask)) * step
        values[i] = -level if code > index_mask else level
    return j


@kernel
def add_elements(positions: Any, values: Any, count: int, weight: Any, out: Any) -> None:
    """Compute out += weight * values at the positions. Positions outside (of a damaged payload) are skipped."""
    for j in range(count):
        if positions[j] < out.size:
            out[np.uintp(positions[j])] += weight * out.dtype.type(values[j])
