"""The exact k largest of a chunk, in about one pass over it.

Neighbouring chunks look alike, so the last chunk's threshold, lowered by a few percent, is a good guess for this one:
the pass that adds gradient and residual also counts how many magnitudes reach the guess. If that is at least k and not
many more, they are collected (64 compares at a time) and the k-th largest is searched among those few only. Otherwise a
bisection over the whole chunk finds it. The guess decides how long it takes, never what is selected.

Magnitudes are compared as integers (`magnitude_bits`): float32 in 31 bits, float64 in 63.
"""

from typing import Any

import numpy as np

from .jit import CACHE_LINE, kernel, lowest_one, magnitude_bits, mask64, prefetch_soon, widen

CROWD = 8
"""Up to this many times k candidates are cheaper to search than the chunk."""


@kernel
def total_at(g: Any, r: Any, i: Any) -> Any:
    """Entry i of tensor + residual."""
    if r is None:
        return widen(g[i])
    return widen(g[i]) + r[i]


@kernel
def fill_magnitudes(g: Any, r: Any, start: int, size: int, guess: Any, magnitudes: Any) -> Any:
    """Write the magnitudes of `size` entries of g + r from `start` on, and count those that reach the guess."""
    count = np.int32(0)
    for i in range(size):
        bits = magnitude_bits(total_at(g, r, np.uintp(start + i)))
        magnitudes[i] = bits
        count = np.int32(count + np.int32(bits >= guess))
    return count


@kernel
def largest(values: Any) -> Any:
    result = values[0]
    for i in range(values.size):
        result = max(result, values[i])
    return result


@kernel
def smallest(values: Any) -> Any:
    result = values[0]
    for i in range(values.size):
        result = min(result, values[i])
    return result


@kernel
def count_reaching(values: Any, threshold: Any) -> Any:
    count = np.int32(0)
    for i in range(values.size):
        count = np.int32(count + np.int32(values[i] >= threshold))
    return count


@kernel
def kth_largest(values: Any, k: int, low: Any, high: Any) -> Any:
    """A threshold that k values or more reach, and no higher one does unless exactly k reach it.

    Needs: at least k values reach `low`, fewer than k reach `high`.
    """
    while high - low > 1:
        middle = values.dtype.type(low + (high - low) // 2)
        count = count_reaching(values, middle)
        if count == k:
            return middle
        if count > k:
            low = middle
        else:
            high = middle
    return values.dtype.type(low)


@kernel
def collect(magnitudes: Any, threshold: Any, positions: Any, found: Any, g: Any, r: Any, ahead: int) -> int:
    """Positions and magnitudes of all that reach the threshold, in rising order. Reads whole groups of 64.

    On the way it asks for the entries of g and r from `ahead` on, where the next chunk begins: the memory works while
    this chunk is computed. A request beyond the end does nothing.
    """
    count = 0
    for start in range(0, magnitudes.size, 64):
        for i in range(0, 64, CACHE_LINE // g.itemsize):
            prefetch_soon(g, ahead + start + i)
        if r is not None:
            for i in range(0, 64, CACHE_LINE // r.itemsize):
                prefetch_soon(r, ahead + start + i)
        mask = mask64(magnitudes, start, threshold)
        while mask != np.uint64(0):
            i = start + lowest_one(mask)
            mask &= mask - np.uint64(1)
            positions[count] = i
            found[count] = magnitudes[i]
            count += 1
    return count


@kernel
def keep_k(k: int, threshold: Any, positions: Any, found: Any, count: int) -> None:
    """Drop what is below the threshold, and of those just on it the last ones beyond k."""
    ties = k
    for j in range(count):
        ties -= found[j] > threshold
    kept = 0
    for j in range(count):
        value = found[j]
        tie = value == threshold and ties > 0
        positions[kept] = positions[j]
        found[kept] = value
        ties -= tie
        kept += value > threshold or tie


@kernel
def fill_up(k: int, magnitudes: Any, positions: Any, found: Any, count: int) -> None:
    """Add the first entries that are missing in `positions` until there are k; all of them are zeros.

    What lies below some end is then taken without a gap: only that end has to be found.
    """
    missing, taken, end = k - count, 0, 0
    while missing > 0:
        if taken < count and positions[taken] == end:
            taken += 1
        else:
            missing -= 1
        end += 1
    for j in range(count - 1, taken - 1, -1):
        positions[end + j - taken] = positions[j]
        found[end + j - taken] = found[j]
    for i in range(end):
        positions[i] = i
        found[i] = magnitudes[i]


@kernel
def select(
    magnitudes: Any, k: int, guess: Any, reached: int, positions: Any, found: Any, g: Any, r: Any, ahead: int
) -> None:
    """Put the k largest into positions[:k], rising, and their magnitudes into found[:k].

    `reached` magnitudes reach `guess`; their array is filled up with -1 to a multiple of 64. For g, r and ahead see
    `collect`. Fewer than k may differ from zero, as in a sum of sparse tensors: then no search is needed.
    """
    if reached < k:
        threshold = magnitudes.dtype.type(1)
        if guess > 1:
            reached = count_reaching(magnitudes, threshold)
        if reached > k:
            threshold = kth_largest(magnitudes, k, threshold, guess)
    elif reached > CROWD * k:
        threshold = kth_largest(magnitudes, k, guess, np.int64(largest(magnitudes)) + 1)
    else:
        threshold = guess
    count = collect(magnitudes, threshold, positions, found, g, r, ahead)
    if count > k:
        candidates = found[:count]
        threshold = kth_largest(candidates, k, threshold, np.int64(largest(candidates)) + 1)
        keep_k(k, threshold, positions, found, count)
    elif count < k:
        fill_up(k, magnitudes, positions, found, count)
