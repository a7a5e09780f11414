"""Checks of payloads with the same results as those of the reference, but fast enough for every step.

Each kernel checks a range of records and returns the number of the first bad one, or `NONE`. The reference then checks
this record alone and raises the error.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from ..layout import Layout, Part
from ..reference.numbers import MARK as MARK
from ..reference.numbers import SMALLEST_SCALE as SMALLEST_SCALE
from . import threads
from .jit import (
    INFINITY_BITS,
    count_ones,
    from_bfloat16,
    kernel,
    load_as,
    lowest_one,
    part_of_kernel,
    prefetch_soon,
    read_field,
)

L = TypeVar("L", bound=Layout)

NONE = -1
INFINITE_SCALE = 0x7F80
INFINITE, MAGNITUDE = INFINITY_BITS[4], np.int32(0x7FFFFFFF)
"""The bits of infinity as a float32, and the mask of those below the sign. NaN is above infinity."""
SMALLEST_SHARED = 1 << 19  # With fewer numbers to check, waking another thread takes as long as the check: about 0.4 ms

PREFETCH_RECORDS = 16
"""Quantize: scales are prefetched this many records ahead, because the hardware does not foresee their addresses."""


def readable(payload: Tensor) -> Any:
    """Return the payload as an array of at least eight bytes, because the kernels load eight bytes at a time.

    A shorter payload is padded with zeros.
    """
    data = payload.contiguous().numpy()
    return data if data.size >= 8 else np.concatenate([data, np.zeros(8 - data.size, np.uint8)])


def check_part(
    find: Callable[[int, int], int], part: Part, numbers_per_row: int, check: Callable[[Tensor, L], None],
    payload: Tensor, layout: L, alone: Callable[[], L],
) -> None:  # fmt: skip
    """Raise the ValueError of the reference's `check` if `find(first, last)` finds a bad record in this part.

    `alone` makes the layout of one record, for which the error is raised, or for the whole payload if this record is
    valid alone. Several threads look if there is enough work.
    """
    if part.rows * numbers_per_row < SMALLEST_SHARED:
        bad = find(0, part.rows)
    else:
        found = threads.run(find, threads.shares(part.rows, numbers_per_row, per_thread=2))
        bad = next((row for row in found if row != NONE), NONE)
    if bad == NONE:
        return
    record = alone()
    at = part.nbytes.start + bad * record.nbytes
    try:
        check(payload[at : at + record.nbytes], record)
    except ValueError as error:
        raise ValueError(f"record {part.elements.start // layout.granule + bad}: {error}") from None
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


# Top-k ----------------------------------------------------------------------------------------------------------------


@kernel
def bad_topk_record(data: Any, start: int, record: Any, marked: bool, first: int, last: int) -> int:
    """Return a bad record among the records `first` to `last` that begin at data[start], or NONE.

    If `marked`, every record must have the mark, else none may.
    """
    for row in range(first, last):
        at = start + row * record.nbytes
        if record.bits == 32:
            good = floats_are_good(data, at, record.k, marked)
        else:
            good = codes_are_good(data, at, record, marked)
        if not good:
            return row
    for row in range(first, last):
        if not positions_are_good(data, start + row * record.nbytes, record):
            return row
    return NONE


@part_of_kernel
def floats_are_good(data: Any, at: int, count: int, marked: bool) -> Any:
    """Return whether every float is finite or, if marked, NaN."""
    smallest, largest = MAGNITUDE, np.int32(0)
    for j in range(count):
        bits = load_as(data, at, j, MAGNITUDE) & MAGNITUDE
        smallest, largest = min(smallest, bits), max(largest, bits)
    return smallest > INFINITE if marked else largest < INFINITE


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
def positions_are_good(data: Any, at: int, record: Any) -> Any:
    """Return whether there are exactly k ascending positions below n, followed by zeros."""
    k, low_bits = record.k, record.low_bits
    low_at, high_at, end = at + record.low_at, at + record.high_at, at + record.nbytes
    if has_padding(data, high_at, k * low_bits) or has_padding(data, end, k + ((record.n - 1) >> low_bits)):
        return False
    mask = (np.uint64(1) << np.uint64(low_bits)) - np.uint64(1)
    whole = end - high_at >= 8  # then eight bytes from any low bits on are inside the record
    count, offset, before, wrong = 0, 0, -1, False
    for byte in range(high_at, end, 7):
        ones = np.uint64(read_field(data, byte, 0, 8 * min(7, end - byte)))
        if count + count_ones(ones) > k:
            return False
        first = 8 * (byte - high_at)
        while ones != np.uint64(0):
            high = first + lowest_one(ones) - count
            ones &= ones - np.uint64(1)
            if whole:
                low = np.int64(load_as(data, low_at + (offset >> 3), 0, np.uint64(0)) >> np.uint64(offset & 7) & mask)
            else:
                low = read_field(data, low_at, offset, low_bits)
            position = high << low_bits | low
            wrong |= position <= before
            before = position
            count += 1
            offset += low_bits
    return count == k and before < record.n and not wrong


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
