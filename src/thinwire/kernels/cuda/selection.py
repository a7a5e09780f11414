"""The exact k-th largest magnitude of a chunk that is in registers.

Counting how many magnitudes reach a threshold costs two instructions per element and one reduction over the block, with
its barriers. A search bit by bit takes 31 such rounds, and these would take longer than the memory accesses.

Here the search ends as soon as exactly k magnitudes reach the threshold. Any threshold between the k-th and the next
magnitude will do, and this gap is about 2^14 bit patterns wide. The first guess is the threshold of the last chunk. The
next ones interpolate the logarithm of the count, which falls about linearly with the logarithm of the threshold (regula
falsi, Illinois variant). This takes five rounds on average for similar chunks, and eight if each chunk has its own
scale (64 of 4,096).

If many elements are equal, no threshold gives k. The search then ends at the tied magnitude, and the ties are counted
in the order of their positions. The guess changes the time, but never the result.
"""

import triton
import triton.language as tl

_FIRST_STEP = tl.constexpr(1 << 21)
"""Without a lower bound, the search goes down from the largest magnitude in steps of this size, doubled each time."""
_LARGEST_STEP = tl.constexpr(1 << 29)
_PULL = tl.constexpr(0.7)
"""If a bound does not move twice in a row, the distance of its count to k is multiplied by this (Illinois variant)."""
_ENOUGH = tl.constexpr(24)  # After this many rounds the rest is bisected, for any distribution


@triton.jit
def over_all(values):
    """Return the sum of a tensor of shape [lanes, steps, 4]."""
    return tl.sum(tl.sum(tl.sum(values, axis=2), axis=1), axis=0)


@triton.jit
def largest(values):
    """Return the maximum of a tensor of shape [lanes, steps, 4]."""
    return tl.max(tl.max(tl.max(values, axis=2), axis=1), axis=0)


@triton.jit
def just_below(threshold):
    """Return the float before the threshold, so that a magnitude reaches the threshold if it is larger; -0.5 for 0."""
    return tl.where(threshold > 0, (threshold - 1).to(tl.float32, bitcast=True), -0.5)


@triton.jit
def reaches(magnitudes, below):
    """Return 1 where a magnitude is above `below`, else 0. A subtraction and its sign cost less than a comparison."""
    return ((below - magnitudes).to(tl.int32, bitcast=True) >> 31) & 1


@triton.jit
def logarithm(number):
    """Return about 2^23 times the logarithm: the bits of a float are a piecewise linear logarithm."""
    return number.to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def slots_of(ones, LANES: tl.constexpr, STEPS: tl.constexpr, FIELD: tl.constexpr):
    """Return, for each element of [LANES, STEPS, 4], how many ones have a lower position (step, lane, place)."""
    each: tl.constexpr = 64 // FIELD if STEPS * FIELD > 64 else STEPS
    every: tl.constexpr = 0x0101010101010101 if FIELD == 8 else 0x0001000100010001
    shifts = FIELD * tl.arange(0, each)[None, None, :]
    counts = tl.reshape(tl.sum(ones, axis=2), (LANES, STEPS // each, each))
    packed = tl.sum(counts.to(tl.int64) << shifts, axis=2)
    totals = tl.sum(packed, axis=0)
    steps_before = totals * every - totals
    if each < STEPS:
        group = (totals * every >> (64 - FIELD)) & ((1 << FIELD) - 1)
        steps_before += (tl.cumsum(group, axis=0) - group) * every
    before = tl.cumsum(packed, axis=0) - packed + steps_before[None, :]
    first = ((before[:, :, None] >> shifts) & ((1 << FIELD) - 1)).to(tl.int32)
    return tl.reshape(first, (LANES, STEPS))[:, :, None] + tl.cumsum(ones, axis=2) - ones


@triton.jit
def find_threshold(magnitudes, n, k, top, guess, LANES: tl.constexpr, STEPS: tl.constexpr):
    """Return (magnitudes, threshold) such that exactly k reach the threshold. Ties that are not taken become -1.

    magnitudes   [lanes, steps, 4]. Missing elements have the magnitude -1, which reaches no threshold.
    top, guess   the largest magnitude and a guess, as bits. The threshold is returned as bits, too.
    """
    zero = top - top
    low, reach_low = zero, n  # at least k reach `low`, fewer than k reach `high`
    high, reach_high = top + 1, zero
    goal = logarithm(k.to(tl.float32) - 0.3)
    height, depth = logarithm(n.to(tl.float32)), logarithm(zero.to(tl.float32) + 0.5)
    probe = tl.minimum(tl.maximum(guess, 1), top)
    step = zero + _FIRST_STEP
    rounds, side = zero, zero
    while (high - low > 1) & (reach_low != k):
        reached = over_all(reaches(magnitudes, (probe - 1).to(tl.float32, bitcast=True)))
        here = logarithm(tl.maximum(reached.to(tl.float32), 0.5))
        if reached >= k:
            low, reach_low, height = probe, reached, here
            depth = tl.where(side == 1, goal - _PULL * (goal - depth), depth)
            side = zero + 1
        else:
            high, reach_high, depth = probe, reached, here
            height = tl.where(side == 2, goal + _PULL * (height - goal), height)
            side = zero + 2
        rounds += 1
        width = high - low
        ahead = (width.to(tl.float32) * tl.fdiv(height - goal, height - depth)).to(tl.int32)
        if low == 0:
            ahead = width - step
            step = tl.minimum(2 * step, _LARGEST_STEP)
        if rounds > _ENOUGH:
            ahead = width // 2
        probe = low + tl.maximum(tl.minimum(ahead, width - 1), 1)
    if reach_low > k:  # so high = low + 1: more magnitudes equal `low` than are wanted
        tied = (magnitudes == low.to(tl.float32, bitcast=True)).to(tl.int32)
        surplus = (tied == 1) & (slots_of(tied, LANES, STEPS, 16) >= k - reach_high)
        magnitudes = tl.where(surplus, -1.0, magnitudes)
    return magnitudes, low
