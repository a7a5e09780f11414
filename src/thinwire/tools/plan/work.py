"""Describe the work of a rank in a step: its compute time, and the buckets of its gradients."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from thinwire.compressors import compressor
from thinwire.sync.buckets import BUCKET_BYTES
from thinwire.sync.policy import Policy
from thinwire.sync.step import PACKED_BYTES

FIRST_BUCKET_BYTES = 1 << 20
"""Size of DDP's first bucket, which is small so that the exchange begins early. Others are as large as thinwire's."""
SMALL = Policy.min_numel
"""Parameters with fewer elements are sent together, compressed by `SMALL_COMPRESSOR`."""
SMALL_COMPRESSOR = compressor(Policy.small_compressor)
_PER_SMALL = 1000
_BACKWARD_SHARE = 2 / 3


class Bucket(NamedTuple):
    """Numbers of elements of a bucket."""

    numel: int
    compressed: int
    """Elements that are compressed: all, with zeros in place of small parameters, or 0 if all parameters are small."""
    small: int = 0
    """Elements of small parameters that are sent with this bucket: its own, and those of earlier buckets."""


@dataclass(frozen=True)
class Work:
    """Work of one rank in one step, without communication."""

    buckets: tuple[Bucket, ...]
    """Buckets in the order in which the backward pass completes them."""
    forward: float
    backward: float
    optimizer: float
    """`forward`, `backward` and `optimizer` are in seconds."""
    dtype: torch.dtype = torch.float32
    """dtype of the gradients."""

    @property
    def numel(self) -> int:
        """Return the number of elements of all buckets."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.forward + self.backward + self.optimizer

    @classmethod
    def of_numbers(
        cls,
        numel: int,
        seconds: float,
        *,
        optimizer: float = 0.0,
        sizes: Iterable[int] = (),
        dtype: torch.dtype = torch.float32,
    ) -> "Work":
        """Create the work from the time of a whole step.

        The backward pass takes two thirds of the step without the optimizer.

        sizes   numel of each parameter, first layer first, if they are known.
        """
        buckets = of_sizes(sizes, dtype) if sizes else of_count(numel, dtype)
        rest = max(0.0, seconds - optimizer)
        return cls(
            buckets,
            forward=(1 - _BACKWARD_SHARE) * rest,
            backward=_BACKWARD_SHARE * rest,
            optimizer=min(optimizer, seconds),
            dtype=dtype,
        )


def of_count(numel: int, dtype: torch.dtype = torch.float32) -> tuple[Bucket, ...]:
    """Return the buckets of a model with this number of elements.

    A thousandth of the elements of each bucket are biases and norms, as in a GPT of width 1,024.

    >>> [bucket.numel for bucket in of_count(10_000_000)], of_count(10_000_000)[-1].small
    ([262144, 6553600, 3184256], 9999)
    """
    first = min(numel, FIRST_BUCKET_BYTES // dtype.itemsize)
    whole, rest = divmod(numel - first, BUCKET_BYTES // dtype.itemsize)
    sizes = [first, *[BUCKET_BYTES // dtype.itemsize] * whole, *([rest] if rest else [])]
    return _together([(size, size // _PER_SMALL) for size in sizes], dtype.itemsize)


def of_sizes(sizes: Iterable[int], dtype: torch.dtype = torch.float32) -> tuple[Bucket, ...]:
    """Return the buckets that DDP makes of whole parameters, last parameter first.

    A bucket is full once it has reached its size.

    >>> of_sizes([5_000_000, 300, 8_000_000])
    (Bucket(numel=8000000, compressed=8000000, small=0), Bucket(numel=5000300, compressed=5000300, small=300))
    """
    made: list[tuple[int, int]] = []
    numel = small = 0
    for size in reversed(list(sizes)):
        numel, small = numel + size, small + (size if size < SMALL else 0)
        if dtype.itemsize * numel >= (BUCKET_BYTES if made else FIRST_BUCKET_BYTES):
            made.append((numel, small))
            numel = small = 0
    return _together([*made, (numel, small)] if numel else made, dtype.itemsize)


def _together(counts: list[tuple[int, int]], itemsize: int) -> tuple[Bucket, ...]:
    """Return the buckets for pairs of numbers: all elements, and elements of small parameters.

    Small parameters wait until there are `PACKED_BYTES` of them, or until the last bucket of the step: see
    sync/step.py.
    """
    made: list[Bucket] = []
    waiting = 0
    for number, (numel, small) in enumerate(counts):
        waiting += small
        goes = itemsize * waiting >= PACKED_BYTES or number == len(counts) - 1
        made.append(Bucket(numel, numel if numel > small else 0, waiting if goes else 0))
        waiting = 0 if goes else waiting
    return tuple(made)
