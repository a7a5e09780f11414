"""What an all-reduce costs each rank, from sizes alone: bytes, messages and memory, for any world without running it.

With n entries of e bytes, P ranks, b1 and b2 the payloads of the first and the second compressor for the whole tensor:

                 sent = received per rank        messages        memory beyond tensor and residual
    gather       (P - 1) b1                      P - 1           P b1
    sharded      (b1 + b2) (P - 1) / P           2 (P - 1)       2 b1 + b2 + 4 n / P
    dense        2 e n (P - 1) / P               2 (P - 1)       3 e n + 4 n / P
    values       2 b1 (P - 1) / P                2 (P - 1)       5 b1 + 4 b1 / (e P), and 8 for each value

The memory is what one segment needs: an operation is cut into as many segments as its budget asks for. Shares consist
of whole records, so that ranks differ by a record at most; `sent` is the mean over ranks. Several segments cost 8 bytes
more for each peer, to learn beforehand that all is finite.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil

import torch

from ..compressors import Compressor, NoCompression
from ..kernels.layout import Layout, RandomKLayout, residual_dtype

DENSE = NoCompression()

Span = tuple[int, int]
"""Entries from start up to stop."""


@dataclass(frozen=True)
class Cost:
    """Of one operation, for each rank."""

    sent: float
    """Bytes handed to the network; as many are received. The mean over ranks."""
    messages: int
    """At most; an empty share is not sent."""
    memory: int
    """Bytes beyond tensor and residuals while a segment is under way."""


def shares(numel: int, granule: int, parts: int) -> list[Span]:
    """Cut the entries into `parts` runs of whole records, as even as can be; some are empty if records are few.

    >>> shares(10_000, granule=4096, parts=2)
    [(0, 4096), (4096, 10000)]
    """
    rows = ceil(numel / granule) if numel else 0
    bounds = [min(numel, granule * (rows * part // parts)) for part in range(parts + 1)]
    return list(pairwise(bounds))


@lru_cache(maxsize=1024)
def owned(first: Compressor, numel: int, dtype: torch.dtype, ranks: int) -> tuple[Span, ...]:
    """What each rank owns: runs whose payloads, one behind the other, are the payload of the whole.

    Where they would not be, because a compressor sends a short run dense, the last rank owns everything.
    """
    cut = shares(numel, first.layout(numel, dtype).granule, ranks)
    return tuple(cut if is_whole(first, numel, dtype, cut) else shares(numel, numel, ranks))


def is_whole(compressor: Compressor, numel: int, dtype: torch.dtype, cut: Sequence[Span]) -> bool:
    """Tell whether the payloads of shares, one behind the other, are the payload of the whole tensor.

    They are if shares are cut at records, and none of them is so short that it is sent dense.
    """
    layout = compressor.layout(numel, dtype)
    kinds = {type(compressor.layout(stop - start, dtype)) for start, stop in cut if start < stop}
    return kinds <= {type(layout)} and all(start % layout.granule == 0 for start, stop in cut if start < stop)


def ring(nbytes: int, ranks: int) -> int:
    """What each rank sends when a ring all-reduces so many bytes."""
    return 2 * nbytes * (ranks - 1) // ranks


def gather(first: Compressor, numel: int, dtype: torch.dtype, ranks: int) -> Cost:
    payload = first.nbytes(numel, dtype)
    return Cost((ranks - 1) * payload, ranks - 1, ranks * payload + _working(first.layout(numel, dtype)))


def sharded(first: Compressor, second: Compressor, numel: int, dtype: torch.dtype, ranks: int) -> Cost:
    sizes = Counter(stop - start for start, stop in owned(first, numel, dtype, ranks))
    pieces = first.nbytes(numel, dtype)
    sums = sum(count * second.nbytes(size, dtype_of_sum(second, dtype)) for size, count in sizes.items())
    largest = max(sizes)
    received = ranks * first.nbytes(largest, dtype)
    return Cost(
        (pieces + sums) * (ranks - 1) / ranks,
        2 * (ranks - 1),
        pieces + received + sums + largest * residual_dtype(dtype).itemsize,
    )


def dense(numel: int, dtype: torch.dtype, ranks: int) -> Cost:
    return sharded(DENSE, DENSE, numel, dtype, ranks)


def values(first: Compressor, numel: int, dtype: torch.dtype, ranks: int) -> Cost:
    layout = first.layout(numel, dtype)
    summed = dense(layout.nbytes // dtype.itemsize, dtype, ranks)
    return Cost(summed.sent, summed.messages, 2 * layout.nbytes + summed.memory + _working(layout))


def of(algorithm: str, first: Compressor, second: Compressor, numel: int, dtype: torch.dtype, ranks: int) -> Cost:
    """Of one stage, by the algorithm's name."""
    if algorithm == "gather":
        return gather(first, numel, dtype, ranks)
    if algorithm == "sharded":
        return sharded(first, second, numel, dtype, ranks)
    if algorithm == "values":
        return values(first, numel, dtype, ranks)
    return dense(numel, dtype, ranks)


def hierarchical(
    between: Callable[[int, torch.dtype], Cost], granule: int, numel: int, dtype: torch.dtype, ranks_in_node: int
) -> Cost:
    """Dense over the ranks of a node; `between` is the cost over the nodes, for the (entries, dtype) of one share."""
    inside, wide = dense(numel, dtype, ranks_in_node), residual_dtype(dtype)
    sizes = Counter(stop - start for start, stop in shares(numel, granule, ranks_in_node))
    outside = {size: between(size, wide) for size in sizes}
    largest = outside[max(sizes)]
    return Cost(
        inside.sent + sum(count * outside[size].sent for size, count in sizes.items()) / ranks_in_node,
        inside.messages + largest.messages,
        inside.memory + largest.memory + max(sizes) * wide.itemsize,
    )


def dtype_of_sum(second: Compressor, dtype: torch.dtype) -> torch.dtype:
    """Owners add in float32 and compress that; a sum that is sent whole goes in the tensor's dtype."""
    return dtype if isinstance(second, NoCompression) else residual_dtype(dtype)


def _working(layout: Layout) -> int:
    """What the CPU kernels take for themselves, where that grows with the tensor."""
    if isinstance(layout, RandomKLayout):
        return 8 * layout.k
    whole = layout.granule == layout.numel and layout.nbytes > 1 << 20
    return layout.numel * layout.dtype.itemsize // 20 if whole else 0
