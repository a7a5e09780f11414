"""The exact top-k of a whole tensor: radix selection, 16 bits of the magnitude at a time.

Each pass counts, per thread, how often each value of the next 16 bits occurs among the magnitudes that share the upper
bits found so far; the sum of the counts tells which value the k-th largest has. Two passes settle float32, four
float64. The counts per thread then say where each thread writes its entries, and how many of the ties it may take.
"""

from typing import Any

import numpy as np

from ..layout import TopKRecord
from . import threads
from .jit import INFINITY_BITS, kernel, magnitude_bits
from .records import add_entries, count_bitmap, read_record, write_record
from .selection import collect, fill_magnitudes, total_at

DIGITS = {4: [(15, 16), (0, 15)], 8: [(47, 16), (31, 16), (15, 16), (0, 15)]}
"""(shift, bits) of each pass, by the width of the float."""

STRIDE = 4096
"""Entries at a time when the chosen ones are collected."""

PIECE = 32
"""Bytes of the bitmap at a time when a record is read: up to 256 entries wait for the memory."""


def encode(g: Any, r: Any, record: TopKRecord, out: Any, width: int) -> bool:
    """One record for the whole tensor; False if it is not finite."""
    ranges = threads.shares(g.size)

    def part(array: Any, start: int, stop: int) -> Any:
        return None if array is None else array[start:stop]

    above = [0] * len(ranges)
    ties = above
    prefix, wanted = 0, record.k
    for shift, bits in DIGITS[width]:

        def count(start: int, stop: int, shift: int = shift, bits: int = bits, prefix: int = prefix) -> Any:
            counts = np.zeros(1 << bits, np.int64)
            count_digits(part(g, start, stop), part(r, start, stop), shift, bits, prefix, counts)
            return counts

        counts = threads.run(count, ranges)
        if prefix == 0 and any(
            c[INFINITY_BITS[width] >> shift :].any() for c in counts if shift == DIGITS[width][0][0]
        ):
            return False
        at_or_above = np.cumsum(sum(counts)[::-1])[::-1]
        digit = int(np.flatnonzero(at_or_above >= wanted)[-1])
        wanted -= int(at_or_above[digit + 1]) if digit + 1 < at_or_above.size else 0
        above = [a + int(c[digit + 1 :].sum()) for a, c in zip(above, counts, strict=True)]
        ties = [int(c[digit]) for c in counts]
        prefix = prefix << bits | digit
    # `wanted` of the entries that equal the threshold are taken: the first ones, so each thread knows how many are its.
    quotas = [min(t, max(0, wanted - sum(ties[:i]))) for i, t in enumerate(ties)]
    sizes = [a + q for a, q in zip(above, quotas, strict=True)]
    positions, values = np.empty(record.k, np.int64), np.empty(record.k, f"f{width}")

    def gather(index: int, _: int) -> None:
        start, stop = ranges[index]
        mine = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        buffer = np.full(STRIDE, -1, f"i{width}")
        gather_chosen(
            part(g, start, stop),
            part(r, start, stop),
            prefix,
            quotas[index],
            start,
            buffer,
            positions[mine],
            values[mine],
        )

    threads.run(gather, [(i, i + 1) for i in range(len(ranges))])
    write_record(positions, values, record, np.empty(record.k, np.int32), out)
    return True


def decode(payloads: Any, offset: int, record: TopKRecord, weight: float, out: Any) -> None:
    """out += weight * each payload. The bitmap is cut into one piece per thread; each finds its rank by counting ones."""
    factor = out.dtype.type(weight)
    for payload in payloads:
        data = payload[offset : offset + record.nbytes]
        ranges = threads.shares(record.nbytes - record.high_at, 8)
        ones = threads.run(lambda a, b: count_bitmap(data, record.high_at + a, record.high_at + b), ranges)  # noqa: B023
        ranks = dict(zip(ranges, np.cumsum([0, *ones[:-1]]).tolist(), strict=True))

        def share(start: int, stop: int, data: Any = data, ranks: dict[tuple[int, int], int] = ranks) -> None:
            add_pieces(data, record, start, stop, ranks[start, stop], factor, out)

        threads.run(share, ranges)


@kernel
def count_digits(g: Any, r: Any, shift: int, bits: int, prefix: int, counts: Any) -> None:
    mask = (1 << bits) - 1
    for i in range(g.size):
        magnitude = np.int64(magnitude_bits(total_at(g, r, i)))
        if magnitude >> shift >> bits == prefix:
            counts[magnitude >> shift & mask] += 1


@kernel
def gather_chosen(
    g: Any, r: Any, threshold: int, ties: int, base: int, buffer: Any, positions: Any, values: Any
) -> None:
    """Positions (counted from `base`) and values of all above the threshold, and of the first `ties` that equal it."""
    places = np.empty(buffer.size, np.int64)
    found = np.empty_like(buffer)
    kept = 0
    for start in range(0, g.size, buffer.size):
        stop = min(start + buffer.size, g.size)
        if r is None:
            fill_magnitudes(g[start:stop], None, buffer.dtype.type(threshold), buffer)
        else:
            fill_magnitudes(g[start:stop], r[start:stop], buffer.dtype.type(threshold), buffer)
        buffer[stop - start :] = -1
        for j in range(collect(buffer, buffer.dtype.type(threshold), places, found)):
            if found[j] == threshold:
                ties -= 1
                if ties < 0:
                    continue
            positions[kept] = base + start + places[j]
            values[kept] = total_at(g, r, start + places[j])
            kept += 1


@kernel
def add_pieces(data: Any, record: Any, first_byte: int, last_byte: int, rank: int, weight: Any, out: Any) -> None:
    """out += weight * the entries whose ones stand in these bytes of the bitmap, a piece at a time."""
    positions, values = np.empty((2, 8 * PIECE), np.int64), np.empty((2, 8 * PIECE), np.float32)
    waiting = turn = 0
    for byte in range(first_byte, last_byte, PIECE):
        stop = min(byte + PIECE, last_byte)
        count = read_record(data, record, byte, stop, rank, positions[turn], values[turn], out)
        rank += count_bitmap(data, record.high_at + byte, record.high_at + stop)
        turn = 1 - turn
        add_entries(positions[turn], values[turn], waiting, weight, out)
        waiting = count
    add_entries(positions[1 - turn], values[1 - turn], waiting, weight, out)
