"""TopK encoding in one pass: gradient + residual -> the k largest of each chunk -> packed records.

Memory: a program takes a few chunks, one after the other. A chunk is [steps, lanes, 4] elements. Each lane reads 16
bytes at a time and keeps its elements in registers, so that sums over `steps` and the 4 need no other lane. For 4,096
float32 elements, 16 KiB of gradient and as many of residual are read, 8 bytes per element; with a bfloat16 gradient 6.
The record of 84 bytes is negligible, and the scratch stays in the cache.

Each chunk takes these steps:
 1. x = g + r is computed. (A chunk that is not finite sets the flag, and its record is left to `marks`.)
 2. `find_threshold` finds the k-th largest magnitude in the registers.
 3. Each chosen element gets its slot, the number of chosen elements at lower positions. The counts of all steps are
    fields of one 64-bit number: one scan over lanes serves all, and one multiplication adds up the steps.
 4. The chosen positions are written to the scratch, from where k lanes read them: now they are dense and in order.
 5. These k lanes load the values, which are still in the cache, compute scales and codes, and write the record.

Triton has no addressable shared memory. The scratch is global memory, about 1 KiB per program. The block that wrote it
reads it, with barriers in between.
"""

import triton
import triton.language as tl

from .numbers import INFINITY_BITS, cut_bfloat16, from_bfloat16, inverse, magnitude_bits, nearest_integer
from .selection import find_threshold, just_below, largest, reaches, slots_of

_ONE_BIT_EACH = tl.constexpr(0x0102040810204080)
"""Eight bytes of 0 or 1, multiplied by this, give a highest byte with these bits, the first one lowest."""


@triton.jit
def quantize(values, chosen, k, BITS: tl.constexpr):
    """Return (low, step, codes) as defined by `reference.topk.quantize`, with the scales as bfloat16 bits."""
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
def write_bytes(out, words, rows, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Write the lowest BYTES bytes of words[:rows], at any address."""
    row, byte = tl.arange(0, ROWS)[:, None], tl.arange(0, BYTES)[None, :]
    tl.store(out + row * BYTES + byte, ((words[:, None] >> (8 * byte)) & 0xFF).to(tl.uint8), mask=row < rows)


@triton.jit
def write_codes(out, codes, k, BITS: tl.constexpr, K: tl.constexpr):
    """Write k codes of BITS bits. The codes after them must be 0."""
    if BITS >= 8:
        write_bytes(out, codes, k, K, BITS // 8)
    else:
        each: tl.constexpr = 8 // BITS
        bits = tl.reshape(codes, (K // each, each)) << (BITS * tl.arange(0, each)[None, :])
        byte = tl.arange(0, K // each)
        tl.store(out + byte, tl.sum(bits, axis=1).to(tl.uint8), mask=byte * each < k)


@triton.jit
def write_low_bits(out, scratch, origin, k, low_bits, nbytes, BYTES: tl.constexpr, FIELDS: tl.constexpr):
    """Write the lowest bits of each position. Up to FIELDS positions share a byte."""
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
def encode_chunks(
    g_ptr, r_ptr, out_ptr, scratch_ptr, flag_ptr,
    rows, per_program, n, k, low_bits, codes_at, low_at, high_at, nbytes, limit,
    BITS: tl.constexpr, HAS_R: tl.constexpr, MASKED: tl.constexpr,
    STEPS: tl.constexpr, LANES: tl.constexpr, FIELD: tl.constexpr,
    K: tl.constexpr, LOW_BYTES: tl.constexpr, LOW_FIELDS: tl.constexpr, BITMAP: tl.constexpr,
):  # fmt: skip
    """Encode chunks of g + r into records.

    K, LOW_BYTES and BITMAP are k and the sizes in bytes of the last two fields, rounded up to powers of two.
    MASKED: n is below STEPS * LANES * 4, and there is one row.
    """
    program = tl.program_id(0)
    scratch = scratch_ptr + program.to(tl.int64) * (K + 2 * BITMAP)
    bitmap = (scratch + K).to(tl.pointer_type(tl.int64))
    # As the memory has them, and as the lanes do.
    elements = tl.arange(0, STEPS)[:, None] * (LANES * 4) + tl.arange(0, LANES * 4)[None, :]
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
            total = tl.load(g + elements, mask=elements < n, other=0.0).to(tl.float32)
        else:
            total = tl.load(g + tl.max_contiguous(elements, [1, 4])).to(tl.float32)
        if HAS_R:
            if MASKED:
                total += tl.load(r + elements, mask=elements < n, other=0.0)
            else:
                total += tl.load(r + elements)
        bits = tl.permute(tl.reshape(magnitude_bits(total), (STEPS, LANES, 4)), (1, 0, 2))
        top = largest(bits)
        if top >= INFINITY_BITS:
            tl.store(flag_ptr, 1)
        else:
            magnitudes = bits.to(tl.float32, bitcast=True)
            if MASKED:
                magnitudes = tl.where(lanes + places < n, magnitudes, -1.0)
            magnitudes, guess = find_threshold(magnitudes, n, k, top, guess, LANES, STEPS)
            below = just_below(guess)
            slots = slots_of(reaches(magnitudes, below), LANES, STEPS, FIELD)
            tl.store(bitmap + byte, tl.zeros((BITMAP,), tl.int64))
            # Counted from `row`, the positions are no constants: as such they would wait in 32 registers.
            tl.store(scratch + slots, (lanes + row) + places, mask=magnitudes > below)
            tl.debug_barrier()

            sent = slot < k
            position = tl.load(scratch + slot, mask=sent, other=row) - row
            value = tl.load(g + position, mask=sent, other=0.0).to(tl.float32)
            if HAS_R:
                value += tl.load(r + position, mask=sent, other=0.0)
            high = (position >> low_bits) + slot
            tl.store(bitmap.to(tl.pointer_type(tl.int8)) + high, tl.full((K,), 1, tl.int8), mask=sent)
            cut = tl.minimum(tl.maximum(value, -limit), limit)
            if BITS == 32:
                write_bytes(out, cut.to(tl.int32, bitcast=True), k, K, 4)
            else:
                low, step, codes = quantize(cut, sent, k, BITS)
                tl.store(out, (low & 0xFF).to(tl.uint8))
                tl.store(out + 1, (low >> 8).to(tl.uint8))
                if BITS > 1:
                    tl.store(out + 2, (step & 0xFF).to(tl.uint8))
                    tl.store(out + 3, (step >> 8).to(tl.uint8))
                write_codes(out + codes_at, tl.where(sent, codes, 0), k, BITS, K)
            if LOW_FIELDS > 0:
                write_low_bits(out + low_at, scratch, row, k, low_bits, high_at - low_at, LOW_BYTES, LOW_FIELDS)
            tl.debug_barrier()
            eight = tl.load(bitmap + byte) * _ONE_BIT_EACH
            tl.store(out + high_at + byte, (eight >> 56).to(tl.uint8), mask=byte < nbytes - high_at)
        tl.debug_barrier()  # the next chunk writes the scratch again
        row += 1
