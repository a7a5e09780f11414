"""Quantize kernels, one pass each way. A program takes a few blocks of one record and keeps them in its registers.

Memory: to encode, each element of gradient and residual is read once, and its code of `bits` bits is written once: 9
bytes per element for 8 bits and float32. To decode, the codes of all payloads are read
and `out` is written once. The scales are stored before the codes of their record, two bytes for each block.

The scale is the only number that depends on a whole block. It is a maximum (or a mean, for 1 and 2 bits): a single
reduction, so memory bandwidth alone limits these kernels. `reference.quantize` defines the numbers.

If a block is not finite, its program sets the flag, and the payload is left to `marks`.
"""

import triton
import triton.language as tl

from .numbers import (
    INFINITY_BITS,
    cut_bfloat16,
    from_bfloat16,
    inverse,
    magnitude_bits,
    nearest_integer,
    read_bfloat16,
    signed_level,
)

_PER_RECORD = tl.constexpr(16)


@triton.jit
def scales_of(values, present, BITS: tl.constexpr):
    """Return one bfloat16 scale, as bits, for each row."""
    magnitudes = tl.where(present, tl.abs(values), 0.0)
    if BITS > 2:
        top: tl.constexpr = 1.0 * ((1 << (BITS - 1)) - 1)
        largest = tl.max(magnitudes, axis=1)
        scale = cut_bfloat16(tl.div_rn(largest, 0.0 * largest + top))
    else:
        number = tl.maximum(tl.sum(present.to(tl.int32), axis=1), 1).to(tl.float64)
        mean = tl.sum(magnitudes.to(tl.float64), axis=1) / number
        if BITS == 1:
            scale = cut_bfloat16(mean)
        else:
            large = present & (magnitudes > (0.75 * mean).to(tl.float32)[:, None])
            number = tl.maximum(tl.sum(large.to(tl.int32), axis=1), 1).to(tl.float64)
            scale = cut_bfloat16(tl.sum(tl.where(large, magnitudes, 0.0).to(tl.float64), axis=1) / number)
    return scale


@triton.jit
def codes_of(values, step, BITS: tl.constexpr):
    """Return the codes of rows of values."""
    top: tl.constexpr = (1 << (BITS - 1)) - 1
    sign = values.to(tl.int32, bitcast=True) >> 31 & 1
    if BITS == 1:
        codes = sign
    else:
        share = tl.minimum(tl.abs(values) * inverse(step)[:, None], top * 1.0)
        codes = nearest_integer(share) | (sign << (BITS - 1))
    return codes


@triton.jit
def level_of(codes, step, BITS: tl.constexpr):
    """Return the values that the codes represent."""
    return signed_level(codes, step if BITS == 1 else 0.0 * step, 0.0 * step if BITS == 1 else step, BITS)


@triton.jit(do_not_specialize=["blocks", "numel", "limit"])
def encode_blocks(
    g_ptr, r_ptr, out_ptr, flag_ptr, blocks, numel, limit,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_R: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Encode ROWS blocks of a record of `blocks` blocks.

    MASKED: this is the last record, of `numel` elements. Otherwise all records have 16 blocks.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    elements = first * BLOCK + row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = elements < numel
    if MASKED:
        total = tl.load(g_ptr + elements, mask=inside, other=0.0).to(tl.float32)
        if HAS_R:
            total += tl.load(r_ptr + elements, mask=inside, other=0.0)
    else:
        total = tl.load(g_ptr + elements).to(tl.float32)
        if HAS_R:
            total += tl.load(r_ptr + elements)
    if tl.max(tl.max(magnitude_bits(total), axis=1), axis=0) >= INFINITY_BITS:
        tl.store(flag_ptr, 1)
    values = tl.minimum(tl.maximum(total, -limit), limit)
    present = inside if MASKED else elements >= 0
    scale = scales_of(values, present, BITS)
    codes = codes_of(values, from_bfloat16(scale), BITS)
    if MASKED:
        codes = tl.where(inside, codes, 0)
    if MASKED:
        record, codes_at, block = out_ptr, 2 * blocks, first
    else:
        nbytes: tl.constexpr = 2 * _PER_RECORD + _PER_RECORD * BLOCK * BITS // 8
        record, codes_at, block = out_ptr + first // _PER_RECORD * nbytes, 2 * _PER_RECORD, first % _PER_RECORD
    there = block + row < blocks
    tl.store(record + 2 * (block + row), (scale & 0xFF).to(tl.uint8), mask=there)
    tl.store(record + 2 * (block + row) + 1, (scale >> 8).to(tl.uint8), mask=there)
    each: tl.constexpr = 8 // BITS
    if BITS < 8:
        shifts = BITS * tl.arange(0, each)[None, None, :]
        codes = tl.sum(tl.reshape(codes, (ROWS, BLOCK // each, each)) << shifts, axis=2)
    place = row[:, None] * (BLOCK // each) + tl.arange(0, BLOCK // each)[None, :]
    target = record + codes_at + block * (BLOCK // each) + place
    if MASKED:
        tl.store(target, codes.to(tl.uint8), mask=(first * BLOCK + place * each) < numel)
    else:
        tl.store(target, codes.to(tl.uint8))


@triton.jit(do_not_specialize=["payloads", "blocks", "numel", "weight"])
def decode_blocks(
    payload_ptr, g_ptr, out_ptr, stride, payloads, blocks, numel, weight,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, START: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute out <- (0, out, or out + g) + weight * each payload, ROWS blocks in each program."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    elements = first * BLOCK + row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = elements < numel
    each: tl.constexpr = 8 // BITS
    if MASKED:
        record, codes_at, block = payload_ptr, 2 * blocks, first
    else:
        nbytes: tl.constexpr = 2 * _PER_RECORD + _PER_RECORD * BLOCK * BITS // 8
        record, codes_at, block = payload_ptr + first // _PER_RECORD * nbytes, 2 * _PER_RECORD, first % _PER_RECORD
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    if START >= 1:  # without a mask, which would keep loads and stores from being wide
        if MASKED:
            total = tl.load(out_ptr + elements, mask=inside, other=0.0).to(tl.float32)
        else:
            total = tl.load(out_ptr + elements).to(tl.float32)
    if START == 2:
        if MASKED:
            total += tl.load(g_ptr + elements, mask=inside, other=0.0).to(tl.float32)
        else:
            total += tl.load(g_ptr + elements).to(tl.float32)
    place = row[:, None] * (BLOCK // each) + tl.arange(0, BLOCK // each)[None, :]
    p = 0 * payloads
    while p < payloads:
        mine = record + p.to(tl.int64) * stride
        step = read_bfloat16(mine + 2 * (block + row), block + row < blocks)[:, None]
        source = mine + codes_at + block * (BLOCK // each) + place
        if MASKED:
            code = tl.load(source, mask=first * BLOCK + place * each < numel, other=0).to(tl.int32)
        else:
            code = tl.load(source).to(tl.int32)
        if BITS < 8:
            code = (code[:, :, None] >> (BITS * tl.arange(0, each)[None, None, :])) & ((1 << BITS) - 1)
            code = tl.reshape(code, (ROWS, BLOCK))
        total += level_of(code, step, BITS) * weight
        p += 1
    if MASKED:
        tl.store(out_ptr + elements, total.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptr + elements, total.to(out_ptr.dtype.element_ty))
