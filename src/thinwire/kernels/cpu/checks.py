"""Checks of payloads with the same results as those of the reference, but fast enough for every step.

Each kernel checks a range of records and returns the number of the first bad one, or `NONE`. The reference then checks
this record alone and raises the error.
"""

import functools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..layout import Layout
from ..reference import dense as reference
from ..reference.numbers import MARK as MARK
from ..reference.numbers import SMALLEST_SCALE as SMALLEST_SCALE
from . import threads
from .jit import INFINITY_BITS, count_ones, from_bfloat16, kernel, load_as, part_of_kernel, prefetch_soon, read_field

L = TypeVar("L", bound=Layout)

NONE = -1
INFINITE_SCALE = 0x7F80
INFINITE = INFINITY_BITS[4]
SEVEN_BYTES = np.uint64((1 << 56) - 1)
MANY = np.uint64(0xFF)
"""Mask for the up to eight low-bit fields that are compared with the next field at a time."""

SMALLEST_SHARED = 1 << 19
"""With fewer numbers to check, waking another thread takes as long as the check: about 0.4 ms."""

PREFETCH_RECORDS = 16
"""Quantize: scales are prefetched this many records ahead, because the hardware does not foresee their addresses."""


class Compare(NamedTuple):
    """Masks that compare neighbouring fields inside a word, several pairs at a time."""

    pairs: int
    """Number of pairs; 0 if two fields do not fit into the bits that one load of eight bytes is sure to contain."""
    even: Any
    odd: Any
    even_flags: Any
    odd_flags: Any
    """Masks of every other field (`even`, `odd`), and of the bit above each of these fields."""
    flags: Any
    """The flags of each set of pairs. The index is the set, as bits of an integer."""


@functools.cache
def compare_fields(width: int) -> Compare:
    """Return the masks for fields of `width` bits."""
    pairs = min(8, 57 // width - 1) if width else 0

    def word(bits: int, chosen: Iterable[int]) -> Any:
        return np.uint64(sum(bits << width * j for j in chosen))

    flags = [word(1 << width, [j for j in range(pairs) if chosen >> j & 1]) for chosen in range(int(MANY) + 1)]
    even, odd, field = range(0, pairs, 2), range(1, pairs, 2), (1 << width) - 1
    return Compare(
        pairs=max(0, pairs),
        even=word(field, even),
        odd=word(field, odd),
        even_flags=word(1 << width, even),
        odd_flags=word(1 << width, odd),
        flags=np.array(flags),
    )


def _followed() -> Any:
    """Return a table by nine bits: how many of the low eight are ones, and which of these have a one right above."""
    table = np.zeros(512, np.uint16)
    for bits in range(512):
        ones = [i for i in range(8) if bits >> i & 1]
        table[bits] = len(ones) << 8 | sum((bits >> i + 1 & 1) << rank for rank, i in enumerate(ones))
    return table


FOLLOWED = _followed()


def readable(payload: Tensor, layout: Layout) -> Any:
    """Return the payload as an array of at least eight bytes, because the kernels load eight bytes at a time.

    A shorter payload is padded with zeros. Raises ValueError if its size does not match the layout.
    """
    if payload.numel() != layout.nbytes:
        raise ValueError(f"a payload of {payload.numel()} bytes, expected {layout.nbytes} for {layout.numel} elements")
    data = payload.contiguous().numpy()
    return data if data.size >= 8 else np.concatenate([data, np.zeros(8 - data.size, np.uint8)])


def first_bad(find: Callable[[int, int], int], rows: int, numbers_per_row: int) -> int:
    """Return the first bad record that `find(first, last)` finds, on several threads if there is enough work."""
    if rows * numbers_per_row < SMALLEST_SHARED:
        return int(find(0, rows))
    found = threads.run(find, threads.shares(rows, numbers_per_row, per_thread=2))
    return next((row for row in found if row != NONE), NONE)


def refuse(
    check: Callable[[Tensor, L], None], number: int, record: Tensor, alone: L, payload: Tensor, layout: L
) -> NoReturn:
    """Raise the reference's ValueError for this record, or for the whole payload if the record alone is valid."""
    try:
        check(record, alone)
    except ValueError as error:
        raise ValueError(f"record {number}: {error}") from None
    refuse_all(check, payload, layout)


def refuse_all(check: Callable[[Tensor, L], None], payload: Tensor, layout: L) -> NoReturn:
    """Raise the reference's ValueError for this payload."""
    check(payload, layout)
    raise AssertionError("a payload is refused, but the reference accepts it: a bug in thinwire")


@functools.cache
def largest_scale(bits: int) -> int:
    """Return the bits of the largest bfloat16 scale whose levels, for codes of `bits` bits, are finite in float32."""
    top = max(1, (1 << (bits - 1)) - 1)
    scales = np.arange(SMALLEST_SCALE, INFINITE_SCALE, dtype=np.uint32)
    with np.errstate(over="ignore"):
        finite = np.isfinite((scales << np.uint32(16)).view(np.float32) * np.float32(top))
    return int(scales[finite][-1])


# Plain numbers --------------------------------------------------------------------------------------------------------

FORMATS: dict[torch.dtype, tuple[Any, int]] = {
    torch.float16: (np.int16(0x7FFF), 0x7C00),
    torch.bfloat16: (np.int16(0x7FFF), 0x7F80),
    torch.float32: (np.int32(0x7FFFFFFF), INFINITY_BITS[4]),
    torch.float64: (np.int64(0x7FFFFFFFFFFFFFFF), INFINITY_BITS[8]),
}
"""For each dtype: the mask of the bits below the sign, and these bits of infinity. Larger ones are NaN."""


def check_values(payload: Tensor, layout: Layout) -> None:
    """Raise ValueError unless a payload that consists of values only is finite or, as the mark, NaN everywhere.

    This is a faster `reference.dense.check`.
    """
    data = readable(payload, layout)
    magnitude, infinite = FORMATS[layout.dtype]
    size, count = layout.dtype.itemsize, layout.nbytes // layout.dtype.itemsize
    if count:
        find = partial(bad_values, data, size, magnitude, infinite, layout.is_marked(payload))
        if first_bad(find, count, 1) != NONE:
            refuse_all(reference.check, payload, layout)


@kernel
def bad_values(data: Any, size: int, magnitude: Any, infinite: int, marked: bool, first: int, last: int) -> int:
    """Return `first` if a value from there to `last` is not finite (if marked: not NaN), else NONE."""
    return NONE if floats_are_good(data, first * size, last - first, magnitude, infinite, marked) else first


@part_of_kernel
def floats_are_good(data: Any, at: int, count: int, magnitude: Any, infinite: int, marked: bool) -> Any:
    """Return whether every float is finite or, if marked, NaN.

    `magnitude` is the mask of the bits below the sign, an integer of the float's width.
    """
    smallest, largest = magnitude, magnitude ^ magnitude
    for j in range(count):
        bits = load_as(data, at, j, magnitude) & magnitude
        smallest, largest = min(smallest, bits), max(largest, bits)
    return smallest > infinite if marked else largest < infinite


# Top-k ----------------------------------------------------------------------------------------------------------------


@kernel
def bad_topk_record(data: Any, start: int, record: Any, compare: Any, marked: bool, first: int, last: int) -> int:
    """Return a bad record among the records `first` to `last` that begin at data[start], or NONE.

    If `marked`, every record must have the mark, else none may.
    """
    for row in range(first, last):
        at = start + row * record.nbytes
        if record.bits == 32:
            good = floats_are_good(data, at, record.k, np.int32(0x7FFFFFFF), INFINITE, marked)
        else:
            good = codes_are_good(data, at, record, marked)
        if not good:
            return row
    for row in range(first, last):
        if not positions_are_good(data, start + row * record.nbytes, record, compare):
            return row
    return NONE


@part_of_kernel
def codes_are_good(data: Any, at: int, record: Any, marked: bool) -> Any:
    """Return whether the scales are valid (if marked: the mark), no level is infinite, and zeros follow the codes."""
    bits = record.bits
    low = np.int64(load_as(data, at, 0, np.uint16(0)))
    step = np.int64(load_as(data, at, 1, np.uint16(0))) if bits > 1 else low
    if has_padding(data, at + record.low_at, record.k * bits):
        return False
    if marked:
        return low == MARK and step == MARK
    if not (is_scale(low) and is_scale(step)):
        return False
    if bits == 1:
        return True
    low_value, step_value = from_bfloat16(low), from_bfloat16(step)
    if low_value + np.float32((1 << (bits - 1)) - 1) * step_value < np.inf:
        return True
    # The highest level is infinite; is it, or one below that is, in use?
    highest = 0
    for j in range(record.k):
        highest = max(highest, read_field(data, at + record.codes_at, j * bits, bits - 1))
    return low_value + np.float32(highest) * step_value < np.inf


@part_of_kernel
def is_scale(bits: int) -> bool:
    """Return whether these bfloat16 bits are 0 or a positive normal number."""
    return bits == 0 or SMALLEST_SCALE <= bits < INFINITE_SCALE


@part_of_kernel
def has_padding(data: Any, end: int, used_bits: int) -> Any:
    """Return whether a bit after the last field is set, in the last byte before data[end]."""
    return used_bits & 7 != 0 and data[end - 1] >> (used_bits & 7) != 0


@part_of_kernel
def positions_are_good(data: Any, at: int, record: Any, compare: Any) -> Any:
    """Return whether there are exactly k ascending positions below n, followed by zeros.

    If there is a zero between two ones of the bitmap, their positions ascend. If two ones are adjacent, the low bits of
    the second position must be larger than those of the first.
    """
    k, low_bits = record.k, record.low_bits
    low_at, high_at, end = at + record.low_at, at + record.high_at, at + record.nbytes
    used = k + ((record.n - 1) >> low_bits)
    if has_padding(data, high_at, k * low_bits) or has_padding(data, end, used):
        return False
    # Of the ones before `count`, those before `done` are compared; `followed` tells of the others.
    count, done, followed, wrong = 0, 0, np.uint64(0), np.uint64(0)
    # Eight bytes at a time, the last of which is also the first of the next time: its lowest one may have a neighbour.
    for byte in range(high_at, end, 7):
        begin = min(byte, data.size - 8)
        word = load_as(data, begin, 0, np.uint64(0)) >> np.uint64(8 * (byte - begin))
        if end - byte < 8:
            word &= (np.uint64(1) << np.uint64(8 * (end - byte))) - np.uint64(1)
        own = word if end - byte <= 8 else word & SEVEN_BYTES
        if count + count_ones(word) > k:
            return False
        if count + count_ones(own) - done > 64:
            wrong |= neighbours_not_rising(data, at, record, compare, done, followed)
            done, followed = count, np.uint64(0)
        followed |= ones_followed(word, own) << np.uint64(count - done & 63)
        count += count_ones(own)
        if end - byte <= 8:
            break
    wrong |= neighbours_not_rising(data, at, record, compare, done, followed)
    # With zeros behind the bitmap, only a one at its very end can stand for a position outside.
    at_the_end = data[high_at + (used - 1 >> 3)] >> (used - 1 & 7) & 1
    last = read_field(data, low_at, (k - 1) * low_bits, low_bits)
    outside = at_the_end & (last > (record.n - 1) & ((1 << low_bits) - 1))
    return wrong == np.uint64(0) and count == k and outside == 0


@part_of_kernel
def neighbours_not_rising(data: Any, at: int, record: Any, compare: Any, first: int, followed: Any) -> Any:
    """Return 0 if, for each bit r of `followed`, the low bits of position first + r are below those of the next one."""
    low_bits, low_at = record.low_bits, at + record.low_at
    offset, wrong = first * low_bits, np.uint64(0)
    if compare.pairs > 0 and record.nbytes - record.high_at >= 8:  # so that every load ends inside the record
        while followed != np.uint64(0):
            low = load_as(data, low_at + (offset >> 3), 0, np.uint64(0)) >> np.uint64(offset & 7)
            wrong |= not_rising(low, low >> np.uint64(low_bits), compare) & compare.flags[np.uintp(followed & MANY)]
            followed >>= np.uint64(compare.pairs)
            offset += compare.pairs * low_bits
    else:
        while followed != np.uint64(0):
            after = read_field(data, low_at, offset + low_bits, low_bits)
            wrong |= np.uint64(after <= read_field(data, low_at, offset, low_bits)) & followed
            followed >>= np.uint64(1)
            offset += low_bits
    return wrong


@part_of_kernel
def ones_followed(word: Any, own: Any) -> Any:
    """Return a word: bit r is set if `word` has a one right above the r-th one of `own`, which is its lower part."""
    result, count = np.uint64(0), np.uint64(0)
    for i in range(8):
        part = word if i < 7 else own
        found = np.uint64(FOLLOWED[np.uintp(part >> np.uint64(8 * i) & np.uint64(0x1FF))])
        result |= (found & np.uint64(0xFF)) << count
        count += found >> np.uint64(8)
    return result


@part_of_kernel
def not_rising(low: Any, after: Any, compare: Any) -> Any:
    """Return the flag above each field of `low` that is not below the field of `after` at the same place.

    Only every other field is taken, to make room for the difference: field + flag - other has the flag if field >=
    other.
    """
    even = ((low & compare.even) | compare.even_flags) - (after & compare.even)
    odd = ((low & compare.odd) | compare.odd_flags) - (after & compare.odd)
    return (even & compare.even_flags) | (odd & compare.odd_flags)


# Quantize -------------------------------------------------------------------------------------------------------------


@kernel
def bad_quantize_record(
    data: Any, start: int, nbytes: int, blocks: int, code_bits: int, largest: int, marked: bool, first: int, last: int
) -> int:
    """Return a bad record like `bad_topk_record`. Only scales and padding can be bad, because every code is a level."""
    span = np.uint16(largest - SMALLEST_SCALE)
    for row in range(first, last):
        at = start + row * nbytes
        prefetch_soon(data, at + PREFETCH_RECORDS * nbytes)
        bad = has_padding(data, at + nbytes, code_bits)
        for b in range(blocks):
            scale = load_as(data, at, b, np.uint16(0))
            if marked:
                bad |= scale != np.uint16(MARK)
            else:
                # Below the smallest, the difference becomes a number near 2**16.
                bad |= (scale != np.uint16(0)) & (np.uint16(scale - np.uint16(SMALLEST_SCALE)) > span)
        if bad:
            return row
    return NONE
