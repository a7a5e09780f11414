"""TopK, one pass: gradient + residual -> the k largest of each chunk -> packed records, and the rest into the residual.

Memory. A program takes a few chunks, one after the other. A chunk is [steps, lanes, 4] entries: each lane reads 16
bytes at a time, and its entries stay in its registers, so that sums over `steps` and the 4 need no other lane. For
4,096 float32 that is 16 KiB read twice (gradient, residual) and written once, 12 bytes an entry; with a bfloat16
gradient 10. The record of 84 bytes and the scratch, which stays in the cache, are nothing beside that.

How a chunk goes through:
 1. x = g + r goes back to the residual as it is, before anything else: the memory works while the rest is computed.
    (A chunk that is not finite is not written; it raises the flag, and its record starts with a NaN.)
 2. `find_threshold` finds the k-th largest magnitude in the registers.
 3. Each chosen entry gets its slot, the number of those at lower positions. The counts of all steps are fields of one
    64-bit number: one scan over lanes serves all, and one multiplication adds up the steps.
 4. The chosen positions go to the scratch, from where k lanes take them: now they are dense and in order.
 5. Those k lanes fetch the values, which are still in the cache, work out scales and codes, correct their entries of
    the residual, and write the record.

Triton has no addressable shared memory; the scratch is global, a KiB or so per program, and is read by the block that
wrote it, with barriers in between.
"""

import triton
import triton.language as tl

from .numbers import (
    INFINITY_BITS,
    MARK,
    cut_bfloat16,
    from_bfloat16,
    inverse,
    magnitude_bits,
    nearest_integer,
    signed_level,
)
from .selection import find_threshold, just_below, largest, reaches, slots_of

_ONE_BIT_EACH = tl.constexpr(0x0102040810204080)
"""Eight bytes of 0 or 1, times this: the highest byte has them as bits, the first one lowest."""


@triton.jit
def quantize(values, chosen, k, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(low, step, codes), the scales as bfloat16 bits: `reference.topk.quantize`."""
    magnitudes = tl.where(chosen, tl.abs(values), 0.0)
    sign = values.to(tl.int32, bitcast=True) >> 31 & 1
    if BITS <= 2:
        low = cut_bfloat16(tl.sum(magnitudes.to(tl.float64), axis=0) / k.to(tl.float64))
        step = low * 0
        codes = sign
        if BITS == 2:
            large = chosen & (magnitudes >= from_bfloat16(low))
            number = tl.sum(large.to(tl.int32), axis=0)
            small_sum = tl.sum(tl.where(large, 0.0, magnitudes).to(tl.float64), axis=0)
            large_sum = tl.sum(tl.where(large, magnitudes, 0.0).to(tl.float64), axis=0)
            low = cut_bfloat16(small_sum / tl.maximum(k - number, 1).to(tl.float64))
            rise = large_sum / tl.maximum(number, 1).to(tl.float64) - from_bfloat16(low).to(tl.float64)
            step = cut_bfloat16(tl.maximum(rise, 0.0))
            codes = large.to(tl.int32) | (sign << 1)
    else:
        top: tl.constexpr = (1 << (BITS - 1)) - 1
        low = cut_bfloat16(tl.min(tl.where(chosen, magnitudes, float("inf")), axis=0))
        span = tl.max(magnitudes, axis=0) - from_bfloat16(low)
        step = cut_bfloat16(tl.div_rn(span, top + 0.0 * span))
        share = tl.maximum(magnitudes - from_bfloat16(low), 0.0) * inverse(from_bfloat16(step))
        codes = nearest_integer(tl.minimum(share, top * 1.0)) | (sign << (BITS - 1))
    return low, step, codes


@triton.jit
def write_bytes(out, words, rows, ROWS: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lowest BYTES bytes of words[:rows], at any address."""
    row, byte = tl.arange(0, ROWS)[:, None], tl.arange(0, BYTES)[None, :]
    tl.store(out + row * BYTES + byte, ((words[:, None] >> (8 * byte)) & 0xFF).to(tl.uint8), mask=row < rows)


@triton.jit
def write_codes(out, codes, k, BITS: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """k codes of BITS bits; those behind must be 0."""
    if BITS >= 8:
        write_bytes(out, codes, k, K, BITS // 8)
    else:
        each: tl.constexpr = 8 // BITS
        bits = tl.reshape(codes, (K // each, each)) << (BITS * tl.arange(0, each)[None, :])
        byte = tl.arange(0, K // each)
        tl.store(out + byte, tl.sum(bits, axis=1).to(tl.uint8), mask=byte * each < k)


@triton.jit
def write_low_bits(  # type: ignore[no-untyped-def]
    out, scratch, origin, k, low_bits, nbytes, BYTES: tl.constexpr, FIELDS: tl.constexpr
):
    """The lowest bits of each position. Up to FIELDS positions have a share in a byte."""
    byte = tl.arange(0, BYTES)[:, None]
    field = 8 * byte // low_bits + tl.arange(0, FIELDS)[None, :]
    position = (tl.load(scratch + field, mask=field < k, other=origin) - origin) & ((1 << low_bits) - 1)
    shift = field * low_bits - 8 * byte
    bits = tl.where(shift >= 0, position << tl.maximum(shift, 0), position >> tl.maximum(-shift, 0)) & 0xFF
    bits = tl.where(shift < 8, bits, 0)
    at = tl.arange(0, BYTES)
    tl.store(out + at, tl.sum(bits, axis=1).to(tl.uint8), mask=at < nbytes)


SIZES = [
    "rows", "per_program", "n", "k", "low_bits", "codes_at", "low_at", "high_at", "nbytes", "limit",
]  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def encode_chunks(  # type: ignore[no-untyped-def]
    g_ptr, r_ptr, out_ptr, scratch_ptr, flag_ptr,
    rows, per_program, n, k, low_bits, codes_at, low_at, high_at, nbytes, limit,
    BITS: tl.constexpr, HAS_R: tl.constexpr, UPDATE: tl.constexpr, MASKED: tl.constexpr,
    STEPS: tl.constexpr, LANES: tl.constexpr, FIELD: tl.constexpr,
    K: tl.constexpr, LOW_BYTES: tl.constexpr, LOW_FIELDS: tl.constexpr, BITMAP: tl.constexpr,
):  # fmt: skip
    """K, LOW_BYTES and BITMAP are k and the bytes of the last two fields, up to the next power of two.

    MASKED: n is below STEPS * LANES * 4, and there is one row.
    """
    program = tl.program_id(0)
    scratch = scratch_ptr + program.to(tl.int64) * (K + 2 * BITMAP)
    bitmap = (scratch + K).to(tl.pointer_type(tl.int64))
    # As the memory has them, and as the lanes do.
    entries = tl.arange(0, STEPS)[:, None] * (LANES * 4) + tl.arange(0, LANES * 4)[None, :]
    lanes = tl.arange(0, LANES)[:, None, None] * 4
    places = tl.arange(0, STEPS)[None, :, None] * (LANES * 4) + tl.arange(0, 4)[None, None, :]
    slot, byte = tl.arange(0, K), tl.arange(0, BITMAP)
    guess = INFINITY_BITS - 1 + 0 * program
    row = program * per_program
    last = tl.minimum(row + per_program, rows)
    while row < last:
        base = row.to(tl.int64) * (STEPS * LANES * 4)
        out = out_ptr + row.to(tl.int64) * nbytes
        g, r = g_ptr + base, r_ptr + base
        if MASKED:
            total = tl.load(g + entries, mask=entries < n, other=0.0).to(tl.float32)
        else:
            total = tl.load(g + tl.max_contiguous(entries, [1, 4])).to(tl.float32)
        if HAS_R:
            if MASKED:
                total += tl.load(r + entries, mask=entries < n, other=0.0)
            else:
                total += tl.load(r + entries)
        bits = tl.permute(tl.reshape(magnitude_bits(total), (STEPS, LANES, 4)), (1, 0, 2))
        top = largest(bits)
        if top >= INFINITY_BITS:
            tl.store(flag_ptr, 1)
            leading: tl.constexpr = MARK << (16 if BITS == 32 else 0)
            for i in tl.static_range(4 if BITS == 32 else 2):
                tl.store(out + i, (leading >> (8 * i)) & 0xFF)
        else:
            magnitudes = bits.to(tl.float32, bitcast=True)
            if MASKED:
                magnitudes = tl.where(lanes + places < n, magnitudes, -1.0)
            if UPDATE:
                if MASKED:
                    tl.store(r + entries, total, mask=entries < n)
                else:
                    tl.store(r + entries, total)
            magnitudes, guess = find_threshold(magnitudes, n, k, top, guess, LANES, STEPS)
            below = just_below(guess)
            slots = slots_of(reaches(magnitudes, below), LANES, STEPS, FIELD)
            tl.store(bitmap + byte, tl.zeros((BITMAP,), tl.int64))
            # Counted from `row`, the positions are no constants: as such they would wait in 32 registers.
            tl.store(scratch + slots, (lanes + row) + places, mask=magnitudes > below)
            tl.debug_barrier()

            sent = slot < k
            position = tl.load(scratch + slot, mask=sent, other=row) - row
            if UPDATE:
                value = tl.load(r + position, mask=sent, other=0.0)
            else:
                value = tl.load(g + position, mask=sent, other=0.0).to(tl.float32)
                if HAS_R:
                    value += tl.load(r + position, mask=sent, other=0.0)
            high = (position >> low_bits) + slot
            tl.store(bitmap.to(tl.pointer_type(tl.int8)) + high, tl.full((K,), 1, tl.int8), mask=sent)
            cut = tl.minimum(tl.maximum(value, -limit), limit)
            if BITS == 32:
                write_bytes(out, cut.to(tl.int32, bitcast=True), k, K, 4)
                level = cut
            else:
                low, step, codes = quantize(cut, sent, k, BITS)
                level = signed_level(codes, from_bfloat16(low), from_bfloat16(step), BITS)
                tl.store(out, (low & 0xFF).to(tl.uint8))
                tl.store(out + 1, (low >> 8).to(tl.uint8))
                if BITS > 1:
                    tl.store(out + 2, (step & 0xFF).to(tl.uint8))
                    tl.store(out + 3, (step >> 8).to(tl.uint8))
                write_codes(out + codes_at, tl.where(sent, codes, 0), k, BITS, K)
            if UPDATE:
                tl.store(r + position, value - level, mask=sent)
            if LOW_FIELDS > 0:
                write_low_bits(out + low_at, scratch, row, k, low_bits, high_at - low_at, LOW_BYTES, LOW_FIELDS)
            tl.debug_barrier()
            eight = tl.load(bitmap + byte) * _ONE_BIT_EACH
            tl.store(out + high_at + byte, (eight >> 56).to(tl.uint8), mask=byte < nbytes - high_at)
        tl.debug_barrier()  # the next chunk writes the scratch again
        row += 1
