"""TopK decoding of several payloads at once: each chunk is summed in shared memory and written once.

`topk_decode` adds the few elements of each payload to a chunk in global memory. This moves little to and from memory,
but much to and from the L2 cache: a sector to read and a sector to write for every element, which for 8 payloads took
2.9 times as long as writing the result. Here the sums stay in shared memory until all payloads are added.
"""

import triton
import triton.language as tl

from .numbers import from_bfloat16, signed_level
from .shared import (
    add_to_shared,
    count_ones,
    fill_shared,
    list_ones,
    read_shared,
    read_shared_bits,
    read_shared_floats,
    shared_room,
    write_shared,
)


@triton.jit
def shared_field(record, AT: tl.constexpr, j, BITS: tl.constexpr):
    """Return the j-th field of BITS bits after the first AT bytes of a record in shared memory."""
    bit = 8 * AT + j * BITS
    if (32 % BITS == 0) and (8 * AT % BITS == 0):  # none lies across two words
        word = read_shared(record + 4 * (bit >> 5), "b32") >> (bit & 31)
    else:
        word = read_shared_bits(record + 4 * (bit >> 5), bit & 31)
    return word if BITS == 32 else word & ((1 << BITS) - 1)


@triton.jit
def copy_records(
    records, live, staged, NBYTES: tl.constexpr, PITCH: tl.constexpr, AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Copy records to shared memory, PITCH bytes apart. Zeros follow them, and replace records that are not live."""
    SIZE: tl.constexpr = 4 if ALIGNED else 1
    unit = tl.arange(0, PITCH // SIZE)[None, :]
    source = records.to(tl.pointer_type(tl.int32)) if ALIGNED else records
    words = tl.load(source + unit, mask=live & (unit < NBYTES // SIZE), other=0)
    write_shared(staged + tl.arange(0, AT_ONCE)[:, None] * PITCH + SIZE * unit, words, not ALIGNED)


@triton.jit(do_not_specialize=["stride", "payloads", "weight"])
def sum_chunks(
    payload_ptr, out_ptr, stride, payloads, weight,
    CHUNK: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, LOW_BITS: tl.constexpr,
    CODES_AT: tl.constexpr, LOW_AT: tl.constexpr, HIGH_AT: tl.constexpr, NBYTES: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute out <- weight * the sum of all payloads. The sums of a chunk stay in shared memory until all are added.

    AT_ONCE payloads are read together. First their records are copied to shared memory. Then each lane takes a byte of
    a bitmap, TILE bits in all, and lists the upper parts of the positions of its ones. Then each lane takes an element,
    SLOTS in all, at least as many as there are lanes, and adds the j-th element of each payload.
    """
    PITCH: tl.constexpr = max(4, triton.next_power_of_2(NBYTES))
    total = shared_room(shared_bytes(CHUNK, NBYTES, TILE, AT_ONCE))
    listed = total + 4 * CHUNK
    staged = listed + 2 * TILE * AT_ONCE
    row = tl.program_id(0).to(tl.int64)
    which = tl.arange(0, AT_ONCE)[:, None]
    index = tl.arange(0, TILE // 8)[None, :]
    slot = tl.arange(0, SLOTS)
    j = tl.minimum(slot, K - 1)
    fill_shared(total + 16 * tl.arange(0, CHUNK // 4), 0)
    p = 0 * payloads
    while p < payloads:
        records = payload_ptr + row * NBYTES + (p + which).to(tl.int64) * stride
        copy_records(records, p + which < payloads, staged, NBYTES, PITCH, AT_ONCE, ALIGNED)
        fill_shared(listed + 16 * tl.arange(0, TILE * AT_ONCE // 8), -1)  # far above any position
        tl.debug_barrier()
        byte = read_shared(staged + which * PITCH + tl.minimum(HIGH_AT + index, NBYTES - 1), "u8")
        byte = tl.where(HIGH_AT + index < NBYTES, byte, 0)
        ones = count_ones(byte)
        rank = tl.cumsum(ones, axis=1) - ones
        list_ones(byte, listed + 2 * (which * TILE + rank), 8 * index - rank)
        tl.debug_barrier()
        positions, values = (), ()
        for i in tl.static_range(AT_ONCE):
            record = staged + i * PITCH
            position = read_shared(listed + 2 * (i * TILE + j), "u16") << LOW_BITS
            if LOW_BITS > 0:
                position |= shared_field(record, LOW_AT, j, LOW_BITS)
            code = shared_field(record, CODES_AT, j, BITS)
            if BITS == 32:
                value = code.to(tl.float32, bitcast=True)
            else:
                both = read_shared(record, "b32")
                scale, step = from_bfloat16(both & 0xFFFF), from_bfloat16((both >> 16) & 0xFFFF)
                value = signed_level(code, scale, step if BITS > 1 else 0.0 * scale, BITS)
            positions += (position,)  # type: ignore[assignment]
            values += (value * weight,)  # type: ignore[assignment]
        for i in tl.static_range(AT_ONCE):
            add_to_shared(total + 4 * positions[i], values[i], (positions[i] < CHUNK) & (slot < K))
            tl.debug_barrier()
        p += AT_ONCE
    first, second, third, fourth = read_shared_floats(total + 16 * tl.arange(0, CHUNK // 4))
    sums = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (CHUNK,))
    tl.store(out_ptr + row * CHUNK + tl.arange(0, CHUNK), sums.to(out_ptr.dtype.element_ty))


@triton.constexpr_function
def shared_bytes(chunk, nbytes, tile, at_once):
    """Return the shared memory for `sum_chunks`: sums, lists, records, and the rest of a word after the last field."""
    return 4 * chunk + at_once * (2 * tile + max(4, triton.next_power_of_2(nbytes))) + 16
