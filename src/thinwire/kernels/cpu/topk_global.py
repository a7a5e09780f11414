"""The exact top-k of a whole tensor: radix selection, 16 bits of the magnitude at a time.

Each pass counts, per thread, how often each value of the next 16 bits occurs among the magnitudes that share the upper
bits found so far. The sum of the counts gives these 16 bits of the k-th largest. float32 takes two passes, float64
four. From the counts per thread follows where each thread writes its elements, and how many of the ties it takes.
"""

from typing import Any

import numpy as np

from ..layout import TopKRecord
from . import threads
from .jit import INFINITY_BITS, kernel, magnitude_bits
from .records import add_elements, count_bitmap, read_record, write_record
from .selection import collect, fill_magnitudes, total_at

DIGITS = {4: [(15, 16), (0, 15)], 8: [(47, 16), (31, 16), (15, 16), (0, 15)]}
"""(shift, bits) of each pass, by the width of the float in bytes."""

STRIDE = 4096
"""Elements at a time when the chosen ones are collected."""

PIECE = 32
"""Bytes of the bitmap at a time when a record is read. Up to 256 elements are prefetched meanwhile."""


def encode(g: Any, r: Any, record: TopKRecord, out: Any, width: int, limit: float) -> bool:
    """Write one record for the whole tensor. Return False if the tensor is not finite."""
    ranges = threads.shares(g.size, per_thread=1)  # each has tables of its own
    shares = [(g[start:stop], None if r is None else r[start:stop]) for start, stop in ranges]
    found = find_threshold(shares, record.k, width)
    if found is None:
        return False
    threshold, above, ties = found
    positions = np.zeros(record.k, np.int32 if record.n <= 1 << 31 else np.int64)
    values = np.zeros(record.k, f"f{width}")
    ends = np.cumsum(above) + np.cumsum(ties)

    def gather(i: int) -> None:
        mine = slice(ends[i] - above[i] - ties[i], ends[i])
        buffer = np.full(STRIDE, -1, f"i{width}")
        gather_chosen(*shares[i], threshold, ties[i], ranges[i][0], buffer, positions[mine], values[mine])

    threads.run(gather, [(i,) for i in range(len(shares))])
    np.clip(values, -limit, limit, out=values)
    write_record(positions, values, record, np.empty(record.k, np.uint16 if record.bits == 16 else np.uint8), out)
    return True


def find_threshold(shares: list[tuple[Any, Any]], k: int, width: int) -> tuple[int, list[int], list[int]] | None:
    """Return the k-th largest magnitude and, for each share, how many elements above it and equal to it are taken.

    Return None if an element is not finite.
    """
    above, on_it = [0] * len(shares), [0] * len(shares)
    threshold, wanted = 0, k
    for shift, bits in DIGITS[width]:
        counts = [np.zeros(1 << bits, np.int32 if g.size < 1 << 31 else np.int64) for g, _ in shares]
        threads.run(count_digits, [(*share, shift, bits, threshold, counts[i]) for i, share in enumerate(shares)])
        # How many magnitudes have this digit or a higher one.
        summed: Any = np.sum(counts, axis=0, dtype=np.int64)
        reached = np.cumsum(summed[::-1])[::-1]
        if (shift, bits) == DIGITS[width][0] and reached[INFINITY_BITS[width] >> shift]:
            return None
        digit = int(np.flatnonzero(reached >= wanted)[-1])
        wanted -= int(reached[digit + 1]) if digit + 1 < reached.size else 0
        above = [a + int(c[digit + 1 :].sum()) for a, c in zip(above, counts, strict=True)]
        on_it = [int(c[digit]) for c in counts]
        threshold = threshold << bits | digit
    # The first `wanted` of those on the threshold are taken, whichever share they are in.
    before = np.cumsum([0, *on_it[:-1]]).tolist()
    ties = [min(there, max(0, wanted - earlier)) for there, earlier in zip(on_it, before, strict=True)]
    return threshold, above, ties


def decode(payloads: Any, offset: int, record: TopKRecord, weight: float, out: Any) -> None:
    """Compute out += weight * each payload.

    Each thread takes a piece of the bitmap. Counting ones gives the rank of its first element.
    """
    for payload in payloads:
        data = payload[offset : offset + record.nbytes]
        ranges = threads.shares(record.nbytes - record.high_at, 8)
        ones = threads.run(
            count_bitmap, [(data, record.high_at + start, record.high_at + stop) for start, stop in ranges]
        )
        ranks = np.cumsum([0, *ones[:-1]]).tolist()
        pieces = [
            (data, record, start, stop, rank, out.dtype.type(weight), out)
            for (start, stop), rank in zip(ranges, ranks, strict=True)
        ]
        threads.run(add_pieces, pieces)


@kernel
def count_digits(g: Any, r: Any, shift: int, bits: int, prefix: int, counts: Any) -> None:
    """Count each value of the `bits` bits from `shift` on, among magnitudes whose upper bits are `prefix`."""
    mask = (1 << bits) - 1
    for i in range(g.size):
        magnitude = np.int64(magnitude_bits(total_at(g, r, i)))
        if magnitude >> shift >> bits == prefix:
            counts[magnitude >> shift & mask] += 1


@kernel
def gather_chosen(
    g: Any, r: Any, threshold: int, ties: int, base: int, buffer: Any, positions: Any, values: Any
) -> None:
    """Write positions (plus `base`) and values of all elements above the threshold and of the first `ties` on it."""
    places = np.empty(buffer.size, np.int64)
    found = np.empty_like(buffer)
    kept = 0
    for start in range(0, g.size, buffer.size):
        stop = min(start + buffer.size, g.size)
        fill_magnitudes(g, r, start, stop - start, buffer.dtype.type(threshold), buffer)
        buffer[stop - start :] = -1
        for j in range(collect(buffer, buffer.dtype.type(threshold), places, found, g, r, stop)):
            if found[j] == threshold:
                ties -= 1
                if ties < 0:
                    continue
            if kept == positions.size:
                return  # only if someone writes the tensor at this moment: nonsense then, but inside the memory
            positions[kept] = base + start + places[j]
            values[kept] = total_at(g, r, start + places[j])
            kept += 1


@kernel
def add_pieces(data: Any, record: Any, first_byte: int, last_byte: int, rank: int, weight: Any, out: Any) -> None:
    """Compute out += weight * values for the ones in these bytes of the bitmap, a piece at a time."""
    positions, values = np.empty((2, 8 * PIECE), np.int64), np.empty((2, 8 * PIECE), np.float32)
    waiting = turn = 0
    for byte in range(first_byte, last_byte, PIECE):
        stop = min(byte + PIECE, last_byte)
        count = read_record(data, record, byte, stop, rank, positions[turn], values[turn], out)
        rank += count_bitmap(data, record.high_at + byte, record.high_at + stop)
        turn = 1 - turn
        add_elements(positions[turn], values[turn], waiting, weight, out)
        waiting = count
    add_elements(positions[1 - turn], values[1 - turn], waiting, weight, out)
