"""What a rank computes in a step, and the buckets in which its gradients come."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.compressors import compressor
from thinwire.sync.buckets import BUCKET_BYTES
from thinwire.sync.policy import Policy
from thinwire.sync.step import PACKED_BYTES

FIRST_BUCKET_BYTES = 1 << 20
"""DDP's first bucket is small, so that the exchange begins early; the others are as large as thinwire's own."""
SMALL = Policy.min_numel
"""Parameters with fewer entries are sent together, by `SMALL_COMPRESSOR`."""
SMALL_COMPRESSOR = compressor(Policy.small_compressor)
_ENTRY_BYTES = 4
_PER_SMALL = 1000
_BACKWARD_SHARE = 2 / 3


class Bucket(NamedTuple):
    entries: int
    compressed: int
    """All of them, with zeros in place of small parameters; none if all are small."""
    small: int = 0
    """Entries of small parameters, which are sent beside it: its own, and those that waited for them."""


@dataclass(frozen=True)
class Work:
    """Of one rank in one step, without communication."""

    buckets: tuple[Bucket, ...]
    """In the order in which the backward pass completes them."""
    forward: float
    backward: float
    optimizer: float
    """Seconds, all three."""

    @property
    def entries(self) -> int:
        return sum(bucket.entries for bucket in self.buckets)

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.optimizer

    @classmethod
    def of_numbers(cls, entries: int, seconds: float, optimizer: float = 0.0, sizes: Iterable[int] = ()) -> "Work":
        """From the time of a whole step: the backward pass takes two thirds of what the optimizer leaves.

        sizes   of the parameters, first layer first, if they are known.
        """
        buckets = of_sizes(sizes) if sizes else of_count(entries)
        rest = max(0.0, seconds - optimizer)
        return cls(buckets, (1 - _BACKWARD_SHARE) * rest, _BACKWARD_SHARE * rest, min(optimizer, seconds))


def of_count(entries: int) -> tuple[Bucket, ...]:
    """A thousandth of the entries are biases and norms, as in a GPT of width 1,024, some of them in every bucket.

    >>> [bucket.entries for bucket in of_count(10_000_000)], of_count(10_000_000)[-1].small
    ([262144, 6553600, 3184256], 9999)
    """
    first = min(entries, FIRST_BUCKET_BYTES // _ENTRY_BYTES)
    whole, rest = divmod(entries - first, BUCKET_BYTES // _ENTRY_BYTES)
    sizes = [first, *[BUCKET_BYTES // _ENTRY_BYTES] * whole, *([rest] if rest else [])]
    return _together([(size, size // _PER_SMALL) for size in sizes])


def of_sizes(sizes: Iterable[int]) -> tuple[Bucket, ...]:
    """As DDP puts whole parameters together, the last ones first: a bucket is full once it has reached its size.

    >>> of_sizes([5_000_000, 300, 8_000_000])
    (Bucket(entries=8000000, compressed=8000000, small=0), Bucket(entries=5000300, compressed=5000300, small=300))
    """
    made: list[tuple[int, int]] = []
    entries = small = 0
    for size in reversed(list(sizes)):
        entries, small = entries + size, small + (size if size < SMALL else 0)
        if _ENTRY_BYTES * entries >= (BUCKET_BYTES if made else FIRST_BUCKET_BYTES):
            made.append((entries, small))
            entries = small = 0
    return _together([*made, (entries, small)] if entries else made)


def _together(counts: list[tuple[int, int]]) -> tuple[Bucket, ...]:
    """Buckets of so many entries, and so many in small parameters: those wait for each other, until they are many or
    the step's last (see step.py)."""
    made: list[Bucket] = []
    waiting = 0
    for number, (entries, small) in enumerate(counts):
        waiting += small
        goes = _ENTRY_BYTES * waiting >= PACKED_BYTES or number == len(counts) - 1
        made.append(Bucket(entries, entries if entries > small else 0, waiting if goes else 0))
        waiting = 0 if goes else waiting
    return tuple(made)
