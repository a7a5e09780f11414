"""TopK decoding: out <- (0, or out, or out + g) + weight * each payload, in one launch.

Positions are stored as a bitmap and low bits (Elias-Fano). The j-th one of the bitmap stands for the j-th element. The
upper part of its position is the index of the bit minus j. The lower part and the code are the j-th fields. Payloads
are added one after the other, with a barrier in between, so that every rank gets the same bits.

There are two kernels, which decode one chunk at a time:

- `sum_chunks` for sums from zero. It sums a chunk in the multiprocessor's shared memory and writes it once, so that the
  caches see little more than one write of the result, for any number of payloads.
- `decode_chunks` for everything else, and for Triton's interpreter, which has no shared memory to scatter into. It adds
  the few elements of each payload to the chunk in global memory, where the cache keeps them until all are done. With
  `add` only the elements that are sent are read and written.

Elements of a damaged payload that lie outside the chunk are skipped.
"""

import triton
import triton.language as tl

from .numbers import from_bfloat16, read_bfloat16, signed_level

SIZES = [
    "stride", "payloads", "n", "k", "low_bits", "codes_at", "low_at", "high_at", "nbytes", "weight",
]  # fmt: skip
ZERO, KEEP, ADD = 0, 1, 2  # The start of a sum of payloads: 0, out, or out + g


@triton.jit
def read_field(record, at, bit, bits, limit, mask, SPAN: tl.constexpr):
    """Read `bits` bits from this bit on, which SPAN bytes contain. No byte after the record is read."""
    byte = at + (bit >> 3)
    word = tl.load(record + byte, mask=mask, other=0).to(tl.int64 if SPAN > 3 else tl.int32)
    for i in tl.static_range(1, SPAN):
        more = tl.load(record + byte + i, mask=mask & (byte + i < limit), other=0)
        word |= more.to(word.dtype) << (8 * i)
    return (word >> (bit & 7).to(word.dtype)) & ((tl.full((), 1, word.dtype) << bits) - 1)


@triton.jit
def read_elements(
    record, live, first, rank, n, k, low_bits, codes_at, low_at, high_at, nbytes,
    BITS: tl.constexpr, LOW_SPAN: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return (positions, value bits, ranks after them) for the ones in TILE bits of some bitmaps, from `first` on.

    A lane takes one bit. A scan over the bits of all records at once gives each one its rank. Position -1 means no
    element.

    record, live, rank   [1, payloads]: the address of each record, whether it exists, and the ones before `first`.
    """
    place = first + tl.arange(0, TILE)[:, None]
    byte = high_at + (place >> 3)
    bit = (tl.load(record + byte, mask=live & (byte < nbytes), other=0).to(tl.int32) >> (place & 7)) & 1
    j = rank + tl.cumsum(bit, axis=0) - bit
    there = (bit == 1) & (j < k)
    low = read_field(record, low_at, j * low_bits, low_bits, nbytes, there, LOW_SPAN).to(tl.int32)
    position = ((place - j) << low_bits) | low
    position = tl.where(there & (position < n), position, -1)
    if BITS == 32:
        value = tl.load(record + 4 * j, mask=there, other=0).to(tl.int32)
        for i in tl.static_range(1, 4):
            value |= tl.load(record + 4 * j + i, mask=there, other=0).to(tl.int32) << (8 * i)
    else:
        code = read_field(record, codes_at, j * BITS, BITS, nbytes, there, (BITS + 7) // 8).to(tl.int32)
        if ALIGNED and BITS > 1:
            both = tl.load(record.to(tl.pointer_type(tl.int32)), mask=live, other=0)
            scale, step = from_bfloat16(both & 0xFFFF), from_bfloat16((both >> 16) & 0xFFFF)
        else:
            scale = read_bfloat16(record, live)
            step = read_bfloat16(record + 2, live) if BITS > 1 else 0.0 * scale
        value = signed_level(code, scale, step, BITS).to(tl.int32, bitcast=True)
    return position, value, rank + tl.sum(bit, axis=0)[None, :]


@triton.jit
def column_of(values, column, COLUMNS: tl.constexpr):
    """Return one column of an integer tensor. Each lane has all columns of its row, so this compiles to a selection."""
    return tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == column, values, 0), axis=1)


@triton.jit
def add_elements(out, positions, value_bits, weight, read):
    """Compute out += weight * values. `out` is not read where it is known to be zero."""
    there = positions >= 0
    values = tl.load(out + positions, mask=there & read, other=0.0).to(tl.float32)
    values += value_bits.to(tl.float32, bitcast=True) * weight
    tl.store(out + positions, values.to(out.dtype.element_ty), mask=there)


@triton.jit
def fill(out, g, n, START: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Compute out <- 0 or out + g for one chunk."""
    elements = tl.arange(0, CHUNK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if START == 0:
        total = tl.zeros((CHUNK // WIDTH, WIDTH), tl.float32)
    else:
        if MASKED:
            total = tl.load(out + elements, mask=elements < n, other=0.0)
            given = tl.load(g + elements, mask=elements < n, other=0.0).to(tl.float32)
        else:
            total = tl.load(out + elements)
            given = tl.load(g + elements).to(tl.float32)
        total += given
    if MASKED:
        tl.store(out + elements, total.to(out.dtype.element_ty), mask=elements < n)
    else:
        tl.store(out + elements, total.to(out.dtype.element_ty))


@triton.jit
def add_columns(out, positions, values, weight, before, START: tl.constexpr, AT_ONCE: tl.constexpr):
    """Add one payload after the other, with a barrier in between. `before` payloads have been added already."""
    for i in tl.static_range(AT_ONCE):
        read = (START > 0) | (before + i > 0)
        add_elements(out, column_of(positions, i, AT_ONCE), column_of(values, i, AT_ONCE), weight, read)
        tl.debug_barrier()


@triton.jit(do_not_specialize=SIZES)
def decode_chunks(
    payload_ptr, g_ptr, out_ptr, stride, payloads, n, k, low_bits, codes_at, low_at, high_at, nbytes, weight,
    BITS: tl.constexpr, START: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    LOW_SPAN: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Compute out <- (0, out or out + g) + weight * each payload, a chunk in each program.

    AT_ONCE: payloads that are read together, if one tile holds their bitmaps. Otherwise they are read tile by tile, one
    payload at a time.
    MASKED: n is below CHUNK, and there is one record. The chunk is filled in rows of WIDTH elements.
    """
    row = tl.program_id(0).to(tl.int64)
    out, first = out_ptr + row * CHUNK, payload_ptr + row * nbytes
    if START != 1:
        fill(out, g_ptr + row * CHUNK, n, START, MASKED, CHUNK, WIDTH)
        tl.debug_barrier()
    p = 0 * payloads
    while p < payloads:
        which = p + tl.arange(0, AT_ONCE)[None, :]
        rank = tl.zeros((1, AT_ONCE), tl.int32)
        place = 0 * p
        while place < 8 * (nbytes - high_at):
            positions, values, rank = read_elements(
                first + which.to(tl.int64) * stride, which < payloads, place, rank,
                n, k, low_bits, codes_at, low_at, high_at, nbytes, BITS, LOW_SPAN, TILE, ALIGNED,
            )  # fmt: skip
            add_columns(out, positions, values, weight, p, START, AT_ONCE)
            place += TILE
        p += AT_ONCE
