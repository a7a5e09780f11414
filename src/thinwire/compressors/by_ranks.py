"""The default compressor of thinwire's optimizers, by the number of ranks."""

from fractions import Fraction
from math import ceil

from .spec import format_spec as format_spec
from .topk import UNION, TopK

LARGEST_DEFAULT_CHUNK = 1 << 14  # from which the GPU kernels select in one pass
FIRST_RATIO, _FIRST_STEPS = Fraction(1, 96), 128
"""Ratio of each rank under "default" in the first steps; twice as many follow with half the ratio, and so on."""


def default_compressor(ranks: int, step: int | None = None) -> TopK:
    """Return the default compressor of thinwire's optimizers: with more ranks, each rank sends fewer elements.

    The weights change by the union of the elements that all ranks send. It is one element in 48 for any number of
    ranks, so each rank can send less. The chunk grows with the number of ranks, so that as many elements share the
    scales of a chunk.

    But with a ratio of 1/n an element of a rank waits for n steps, which is too long at the start of training. So at
    `step`, counted from the end of the warm-up, each rank begins with one element in 96, and halves that after 128
    steps, after 256 more, and so on, down to its final ratio, which None stands for.

    >>> for ranks in (2, 4, 8, 32):
    ...     print(format_spec(default_compressor(ranks)), *(default_compressor(ranks, s).ratio for s in (0, 128, 384)))
    topk:ratio=1/96,bits=2,chunk=4096 1/96 1/96 1/96
    topk:ratio=1/192,bits=2,chunk=8192 1/96 1/192 1/192
    topk:ratio=1/384,bits=2,chunk=16384 1/96 1/192 1/384
    topk:ratio=1/1536,bits=2,chunk=16384 1/96 1/192 1/384
    """
    ranks = max(2, ranks)
    chunk = min(LARGEST_DEFAULT_CHUNK, 2048 << (ranks - 1).bit_length())
    least = UNION / ranks
    ratio = least if step is None else max(least, FIRST_RATIO / 2 ** halvings(ranks, step))
    return TopK(ratio=ratio, bits=2, chunk=chunk)


def halvings(ranks: int, step: int) -> int:
    """Return how often the first ratio of the default compressor has been halved, at a step after the warm-up.

    >>> [halvings(8, step) for step in (0, 127, 128, 383, 384, 10_000)], halvings(2, 10_000)
    ([0, 0, 1, 1, 2, 2], 0)
    """
    until_now = (step // _FIRST_STEPS + 1).bit_length() - 1
    in_all = ceil(FIRST_RATIO * max(2, ranks) / UNION - 1).bit_length()
    return min(until_now, in_all)
