"""The cost of an all-reduce for each rank: bytes, messages and memory, computed from sizes for any world size.

The tensor has n elements of e bytes. There are P ranks. The payloads of the whole tensor have b1 bytes with the first
compressor and b2 bytes with the second:

                 sent = received per rank        messages        memory beyond tensor and residual
    gather       (P - 1) b1                      P - 1           P b1
    sharded      (b1 + b2) (P - 1) / P           2 (P - 1)       2 b1 + b2 + 4 n / P
    dense        2 e n (P - 1) / P               2 (P - 1)       3 e n + 4 n / P
    values       2 b1 (P - 1) / P                2 (P - 1)       5 b1 + 4 b1 / (e P), and 8 for each value

The memory is that of one segment. An operation is cut into as many segments as its memory budget requires. Shares
consist of whole records, so shares of different ranks can differ by one record; `sent` is the mean over ranks. With
several segments, each rank also sends 8 bytes to each peer, to check beforehand that all inputs are finite.
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

Span = tuple[int, int]  # range of elements (start, stop), without the element `stop`


@dataclass(frozen=True)
class Cost:
    """The cost of one operation for each rank."""

    sent: float  # Bytes sent, as the mean over ranks. The same number is received.
    messages: int  # Largest number of messages sent. An empty share is not sent.
    memory: int  # bytes of memory in use during a segment, beyond tensor and residuals


def shares(numel: int, granule: int, parts: int) -> list[Span]:
    """Cut the elements into `parts` ranges of whole records, as even as possible. With few records some are empty.

    >>> shares(10_000, granule=4096, parts=2)
    [(0, 4096), (4096, 10000)]
    """
    rows = ceil(numel / granule) if numel else 0
    bounds = [min(numel, granule * (rows * part // parts)) for part in range(parts + 1)]
    return list(pairwise(bounds))


@lru_cache(maxsize=1024)
def owned(first: Compressor, numel: int, dtype: torch.dtype, ranks: int) -> tuple[Span, ...]:
    """Return the range that each rank owns: the last one owns everything if a short range would be sent dense."""
    cut = shares(numel, first.layout(numel, dtype).granule, ranks)
    return tuple(cut if is_whole(first, numel=numel, dtype=dtype, cut=cut) else shares(numel, numel, ranks))


def is_whole(compressor: Compressor, numel: int, dtype: torch.dtype, cut: Sequence[Span]) -> bool:
    """Return whether the concatenated payloads of the shares are the payload of the whole tensor."""
    layout = compressor.layout(numel, dtype)
    kinds = {type(compressor.layout(stop - start, dtype)) for start, stop in cut if start < stop}
    return kinds <= {type(layout)} and all(start % layout.granule == 0 for start, stop in cut if start < stop)


@lru_cache(maxsize=1024)  # for each bucket of each step
def ring(nbytes: int, ranks: int) -> int:
    """Return the bytes that each rank sends in a ring all-reduce of `nbytes` bytes."""
    return 2 * nbytes * (ranks - 1) // ranks


def gather(first: Compressor, numel: int, dtype: torch.dtype, ranks: int) -> Cost:
    """Return the cost of gather: all payloads are sent to all ranks."""
    payload = first.nbytes(numel, dtype)
    return Cost((ranks - 1) * payload, ranks - 1, ranks * payload + _working(first.layout(numel, dtype)))


def sharded(first: Compressor, second: Compressor, numel: int, dtype: torch.dtype, ranks: int) -> Cost:
    """Return the cost of sharded."""
    sizes = Counter(stop - start for start, stop in owned(first, numel=numel, dtype=dtype, ranks=ranks))
    pieces = first.nbytes(numel, dtype)
    sums = sum(count * second.nbytes(size, dtype_of_sum(second, dtype)) for size, count in sizes.items())
    largest = max(sizes)
    received = ranks * first.nbytes(largest, dtype)
    memory = pieces + received + sums + largest * residual_dtype(dtype).itemsize
    return Cost((pieces + sums) * (ranks - 1) / ranks, 2 * (ranks - 1), memory)


def dense(numel: int, dtype: torch.dtype, ranks: int) -> Cost:
    """Return the cost of dense, which is sharded without compression."""
    return sharded(DENSE, second=DENSE, numel=numel, dtype=dtype, ranks=ranks)


def of(algorithm: str, first: Compressor, second: Compressor, numel: int, dtype: torch.dtype, ranks: int) -> Cost:
    """Return the cost of one stage with the algorithm of this name."""
    if algorithm == "gather":
        return gather(first, numel=numel, dtype=dtype, ranks=ranks)
    if algorithm == "sharded":
        return sharded(first, second=second, numel=numel, dtype=dtype, ranks=ranks)
    if algorithm == "values":  # dense for the kept values
        layout = first.layout(numel, dtype)
        summed = dense(layout.nbytes // dtype.itemsize, dtype, ranks)
        return Cost(summed.sent, summed.messages, 2 * layout.nbytes + summed.memory + _working(layout))
    return dense(numel, dtype, ranks)


def hierarchical(
    between: Callable[[int, torch.dtype], Cost], granule: int, numel: int, dtype: torch.dtype, ranks_in_node: int
) -> Cost:
    """Return the cost of a dense stage inside the nodes, and of `between` nodes for the (numel, dtype) of a share."""
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
    """Return the dtype in which owners encode a sum: that in which they add, unless the sum is sent dense."""
    return dtype if isinstance(second, NoCompression) else residual_dtype(dtype)


def _working(layout: Layout) -> int:
    """Return the bytes of scratch memory in the CPU kernels, if it grows with the tensor."""
    if isinstance(layout, RandomKLayout):
        return 8 * layout.k
    whole = layout.granule == layout.numel and layout.nbytes > 1 << 20
    return layout.numel * layout.dtype.itemsize // 20 if whole else 0
