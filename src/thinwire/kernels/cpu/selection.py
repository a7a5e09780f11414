"""The exact k largest of a chunk, in about one pass over it.

Neighbouring chunks are similar, so the threshold of the last chunk, lowered by a few percent, is a good guess for the
next one. The pass that adds gradient and residual also counts the magnitudes that reach the guess. If at least k and
not many more reach it, these are collected (64 comparisons at a time), and only they are searched for the k-th largest.
Otherwise a bisection over the whole chunk finds it. The guess changes the time, but never the result.

Magnitudes are compared as integers (`magnitude_bits`): float32 in 31 bits, float64 in 63.
"""

from typing import Any

import numpy as np

from .jit import CACHE_LINE, kernel, lowest_one, magnitude_bits, mask64, prefetch_soon, widen

CROWD = 8  # Up to this many times k, candidates are cheaper to search than the chunk


@kernel
def total_at(g: Any, r: Any, i: Any) -> Any:
    """Return element i of tensor + residual."""
    if r is None:
        return widen(g[i])
    return widen(g[i]) + r[i]


@kernel
def fill_magnitudes(g: Any, r: Any, start: int, size: int, guess: Any, magnitudes: Any) -> Any:
    """Write the magnitudes of `size` elements of g + r from `start` on. Return how many reach the guess."""
    count = np.int32(0)
    for i in range(size):
        bits = magnitude_bits(total_at(g, r, np.uintp(start + i)))
        magnitudes[i] = bits
        count = np.int32(count + np.int32(bits >= guess))
    return count


@kernel
def largest(values: Any) -> Any:
    """Return the largest value."""
    result = values[0]
    for i in range(values.size):
        result = max(result, values[i])
    return result


@kernel
def smallest(values: Any) -> Any:
    """Return the smallest value."""
    result = values[0]
    for i in range(values.size):
        result = min(result, values[i])
    return result


@kernel
def count_reaching(values: Any, threshold: Any) -> Any:
    """Return how many values are >= `threshold`."""
    count = np.int32(0)
    for i in range(values.size):
        count = np.int32(count + np.int32(values[i] >= threshold))
    return count


@kernel
def kth_largest(values: Any, k: int, low: Any, high: Any) -> Any:
    """Return a threshold that exactly k values reach, if the search finds one, else the k-th largest value.

    At least k values must reach `low`, and fewer than k must reach `high`.
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
    """Write positions and magnitudes of all elements that reach the threshold, in ascending order. Return their number.

    Magnitudes are read in whole groups of 64. The elements of g and r from `ahead` on, where the next chunk begins, are
    prefetched meanwhile. A prefetch beyond the end does nothing.
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
    """Keep the k largest: drop elements below the threshold, and the last ones equal to it."""
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
    """Add the first elements that are missing in `positions` until there are k. All of them are zeros.

    The result contains all positions below some end, so only this end has to be found.
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
    """Write the ascending positions of the k largest to positions[:k], and their magnitudes to found[:k].

    `reached` magnitudes reach `guess`. The magnitudes are padded with -1 to a multiple of 64. `g`, `r` and `ahead` are
    those of `collect`. If fewer than k differ from zero, as in a sum of sparse tensors, no search is needed.
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
