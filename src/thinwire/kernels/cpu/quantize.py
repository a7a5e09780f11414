"""Quantize on the CPU, block by block in the L1 cache. `reference.quantize` defines the numbers."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ..layout import QuantizeLayout, residual_dtype
from ..reference import quantize as reference
from . import checks, threads
from .bits import pack, unpack
from .jit import (
    INFINITY_BITS,
    as_array,
    cut_bfloat16,
    from_bfloat16,
    from_magnitude_bits,
    kernel,
    magnitude_bits,
    nearest_integer,
    read_bfloat16,
    sign_of,
    stage_limit,
    staged,
    summing_kernel,
    widen,
    write_bfloat16,
)
from .selection import total_at


def encode(tensor: Tensor, residual: Tensor | None, layout: QuantizeLayout, payload: Tensor) -> bool:
    """Write the payload of tensor + residual. If the sum is not finite, write the mark and return False."""
    g, r, out = as_array(tensor), None if residual is None else as_array(residual), payload.numpy()
    for elements, part in layout.parts(layout.numel):
        r_part = None if r is None else r[part.elements]
        if not _encode_part(g[part.elements], r_part, elements, layout, out[part.nbytes]):
            reference.mark(layout, payload)
            return False
    return True


def _encode_part(g: Any, r: Any, elements: int, layout: QuantizeLayout, out: Any) -> bool:
    nbytes, width = layout.record_nbytes(elements), residual_dtype(layout.dtype).itemsize

    def share(first: int, last: int) -> bool:
        mine = slice(first * elements, last * elements)
        total, codes = np.empty(layout.block, f"f{width}"), np.empty(elements, np.uint8)
        finite = encode_records(
            g[mine], None if r is None else r[mine], elements, layout.block, layout.bits, layout.limit,
            INFINITY_BITS[width], total, codes, out[first * nbytes : last * nbytes],
        )  # fmt: skip
        return bool(finite)

    return all(threads.run(share, threads.shares(g.size // elements, elements)))


def commit(tensor: Tensor, residual: Tensor, layout: QuantizeLayout, payload: Tensor) -> None:
    """Compute residual <- tensor + residual - decode(payload)."""
    g, r, data = as_array(tensor), as_array(residual), payload.unsqueeze(0).numpy()
    for elements, part in layout.parts(layout.numel):
        g_part, r_part = g[part.elements], r[part.elements]
        _decode_part(data, part.nbytes.start, elements, layout, g_part, -1.0, True, r_part)


def decode(payloads: Tensor, layout: QuantizeLayout, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
    data = payloads.numpy()
    for elements, part in layout.parts(stage_limit(out)):
        with staged(out.view(-1)[part.elements], keep=add) as target:
            _decode_part(data, part.nbytes.start, elements, layout, None, weight, add, target)


def _decode_part(
    payloads: Any, offset: int, elements: int, layout: QuantizeLayout, g: Any, weight: float, add: bool, out: Any
) -> None:
    nbytes = layout.record_nbytes(elements)

    def share(first: int, last: int) -> None:
        mine = slice(first * elements, last * elements)
        g_share = None if g is None else g[mine]
        codes = np.empty(elements, np.uint8)
        decode_records(
            payloads, offset + first * nbytes, nbytes, elements, layout.block, layout.bits, g_share, weight, add,
            codes, out[mine],
        )  # fmt: skip

    threads.run(share, threads.shares(out.size // elements, elements))


def check(payload: Tensor, layout: QuantizeLayout) -> None:
    """Raise ValueError for bytes that no compressor can have written; a faster `reference.quantize.check`."""
    data = checks.readable(payload)
    marked, largest = layout.is_marked(payload), checks.largest_scale(layout.bits)
    for elements, part in layout.parts(layout.numel):
        nbytes, blocks, code_bits = layout.record_nbytes(elements), -(-elements // layout.block), elements * layout.bits
        find = partial(checks.bad_quantize_record, data, part.nbytes.start, nbytes, blocks, code_bits, largest, marked)
        alone = partial(replace, layout, numel=elements)
        checks.check_part(find, part, blocks, reference.check, payload=payload, layout=layout, alone=alone)


@kernel
def encode_records(
    g: Any, r: Any, elements: int, block: int, bits: int, limit: float, infinity: int, total: Any, codes: Any, out: Any,
) -> bool:  # fmt: skip
    """Encode every record of g + r, which are only read. Return False at the first block that is not finite.

    `total` is scratch for one block of g + r, `codes` for the codes of one record, one byte each.
    """
    blocks = (elements + block - 1) // block
    nbytes = 2 * blocks + (elements * bits + 7) // 8
    for row in range(g.size // elements):
        target = out[row * nbytes : (row + 1) * nbytes]
        # 8-bit codes are bytes already.
        code_bytes = target[2 * blocks :] if bits == 8 else codes
        for b in range(blocks):
            start = b * block
            size = min(block, elements - start)
            first = row * elements + start
            largest = add_block(g, r, first, size, limit, total)
            if largest >= infinity:
                return False
            scale = block_scale(total, size, largest, bits, limit)
            write_bfloat16(target, 2 * b, scale)
            write_codes(total, size, from_bfloat16(scale), bits, code_bytes, start)
        if bits < 8:
            pack(codes, bits, target[2 * blocks :])
    return True


# From here on loops take an array and where to start instead of a slice: a block is so short that keeping count of the
# references to a slice would cost as much as its arithmetic. An unsigned index saves the test for "from the end".


@kernel
def add_block(g: Any, r: Any, first: int, size: int, limit: float, total: Any) -> Any:
    """Compute total <- g + r, cut to ±limit. Return the largest magnitude before the cut, as `magnitude_bits`."""
    bound = total.dtype.type(limit)
    largest = magnitude_bits(total.dtype.type(0))
    for i in range(size):
        value = total_at(g, r, np.uintp(first + i))
        total[i] = min(max(value, -bound), bound)
        largest = max(largest, magnitude_bits(value))
    return largest


@kernel
def block_scale(total: Any, size: int, largest_bits: Any, bits: int, limit: float) -> Any:
    """Return the scale of the block as bfloat16 bits."""
    number = total.dtype.type
    if bits > 2:
        return cut_bfloat16(min(from_magnitude_bits(largest_bits), number(limit)) / number((1 << (bits - 1)) - 1))
    mean = sum_above(total, size, number(-1)) / size
    if bits == 1:
        return cut_bfloat16(mean)
    threshold = number(0.75 * mean)
    return cut_bfloat16(sum_above(total, size, threshold) / max(count_above(total, size, threshold), 1))


@summing_kernel
def sum_above(total: Any, size: int, threshold: Any) -> float:
    """Return the sum, in float64, of the magnitudes above the threshold."""
    result = 0.0
    number = total.dtype.type
    for i in range(size):
        magnitude = abs(total[i])
        result += np.float64(magnitude if magnitude > threshold else number(0))
    return result


@kernel
def count_above(total: Any, size: int, threshold: Any) -> Any:
    """Return the number of magnitudes above the threshold."""
    count = np.int32(0)
    for i in range(size):
        count = np.int32(count + np.int32(abs(total[i]) > threshold))
    return count


@kernel
def write_codes(total: Any, size: int, step: Any, bits: int, codes: Any, start: int) -> None:
    """Write the codes of one block, rounded to the nearest level."""
    number = total.dtype.type
    top, sign = number((1 << (bits - 1)) - 1), np.int32(1 << (bits - 1))
    inverse = number(1) / number(step) if step > 0 else number(0)
    for i in range(size):
        index = nearest_integer(min(abs(total[i]) * inverse, top))
        # Without the casts Numba widens to 64 bits, and the loop takes twice as long.
        codes[np.uintp(start + i)] = np.int32(np.int32(index) | np.int32(np.int32(sign_of(total[i])) & sign))


@kernel
def decode_records(
    payloads: Any, offset: int, nbytes: int, elements: int, block: int, bits: int,
    g: Any, weight: float, add: bool, codes: Any, out: Any,
) -> None:  # fmt: skip
    """Compute out <- (out + g, or out, or 0) + weight * each payload, record by record, while it is in the cache.

    With g there is one payload, which was encoded from out + g.
    """
    factor = out.dtype.type(weight)
    blocks = (elements + block - 1) // block
    for row in range(out.size // elements):
        target = out[row * elements : (row + 1) * elements]
        if g is None and not add:
            target[:] = 0
        start = offset + row * nbytes
        for p in range(payloads.shape[0]):
            data = payloads[p][start : start + nbytes]
            code_bytes = data[2 * blocks :] if bits == 8 else codes
            if bits < 8:
                unpack(data[2 * blocks :], bits, codes)
            for b in range(blocks):
                size = min(block, elements - b * block)
                step = read_bfloat16(data, 2 * b)
                add_levels(code_bytes, b * block, size, step, bits, factor, g, row * elements + b * block, target)


@kernel
def add_levels(
    codes: Any, start: int, size: int, step: Any, bits: int, weight: Any, g: Any, g_start: int, out: Any
) -> None:
    """Compute out += g, if there is a g, and then out += weight * levels, for one block."""
    number = out.dtype.type
    if bits == 1:
        # ±step: the same products as below, with only two outcomes
        plus, minus = weight * number(step), weight * number(-step)
        for i in range(size):
            sent = minus if codes[np.uintp(start + i)] != 0 else plus
            out[np.uintp(start + i)] = element_at(out, start + i, g, g_start + i) + sent
        return
    mask = np.uint8((1 << (bits - 1)) - 1)
    for i in range(size):
        code = codes[np.uintp(start + i)]
        level = np.float32(code & mask) * step
        sent = weight * number(-level if code > mask else level)
        out[np.uintp(start + i)] = element_at(out, start + i, g, g_start + i) + sent


@kernel
def element_at(out: Any, i: int, g: Any, g_i: int) -> Any:
    """Return out[i], plus g[g_i] if there is a g."""
    if g is None:
        return out[np.uintp(i)]
    return out[np.uintp(i)] + widen(g[np.uintp(g_i)])
