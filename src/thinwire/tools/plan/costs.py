"""What a step consists of: the work of a rank, and what compression and the handling of bytes cost, as measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch

from thinwire.compressors import Compressor, NoCompression, compressor, format_spec
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

    @cached_property
    def numel(self) -> int:
        """Return the number of elements of all buckets."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.forward + self.backward + self.optimizer

    @classmethod
    def of_step(
        cls,
        buckets: tuple[Bucket, ...],
        seconds: float,
        optimizer: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> "Work":
        """Create the work from the time of a whole step.

        The backward pass takes two thirds of the step without the optimizer.
        """
        backward = _BACKWARD_SHARE * (seconds - optimizer)
        return cls(buckets, seconds - optimizer - backward, backward, optimizer, dtype)


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


class Costs(NamedTuple):
    """Seconds per element of a tensor."""

    encode: float = 0.0
    commit: float = 0.0
    """Second half of compress: write to the residual what is not sent."""
    write: float = 0.0
    """Decode one payload into a tensor."""
    add: float = 0.0
    """Decode one more payload and add it to that tensor."""

    def times(self, factor: float) -> "Costs":
        """Return these costs multiplied by `factor`."""
        return Costs(*(factor * seconds for seconds in self))

    def decode(self, payloads: int, density: float = 1.0) -> float:
        """Return the seconds per element to decode `payloads` payloads at once.

        Each payload holds `density` times as many elements as the measured one.
        """
        more = self.add * (density * payloads - 1)
        return max(0.0, self.write + more)


@dataclass(frozen=True)
class Speeds:
    """Costs of one rank for codec, bytes and messages, while all other ranks of its node work too."""

    origin: str
    """Where the costs were measured, as text for the user."""
    codecs: Mapping[Compressor, Costs]
    halves: Costs
    """Costs of the cast to 16 bits and back."""
    operation: float
    """Seconds of a compressed exchange that do not depend on other ranks: hand it to the wire, and apply the result."""
    transfer: float
    message: float
    """`transfer` is in seconds per transfer, `message` in seconds per peer of a transfer. Both are the time in which a
    thread sleeps and is woken."""
    round: float
    """Seconds per message of torch's all-reduce, which waits for the message before it."""
    ring_byte: float
    fp16_byte: float
    spread_byte: float
    """Seconds to send one byte and receive one: in torch's all-reduce, in torch's all-reduce of fp16, which gloo sums
    slowly, and in a compressed exchange."""
    extras: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Seconds per element, by the name of a method, that a step takes in addition to the codec, because of another
    optimizer, and of memory that is no longer in a cache. Empty if they were not measured."""

    def faster(self, factor: float, origin: str) -> "Speeds":
        """Return a copy with a codec that is `factor` times as fast; the costs of bytes and messages stay the same."""
        codecs = {given: costs.times(1 / factor) for given, costs in self.codecs.items()}
        return replace(self, origin=origin, codecs=codecs, halves=self.halves.times(1 / factor))

    def slower(self, factor: float) -> "Speeds":
        """Return a copy in which everything is `factor` times as slow, because the CPU has less time for each rank."""
        made = self.faster(1 / factor, self.origin)
        extras = {name: factor * value for name, value in self.extras.items()}
        names = ("operation", "transfer", "message", "round", "ring_byte", "fp16_byte", "spread_byte")
        return replace(made, extras=extras, **{name: factor * getattr(self, name) for name in names})

    def by_accelerator(self) -> "Speeds":
        """Return a copy in which bytes and the rounds of an all-reduce take no CPU time.

        NCCL transfers them from memory to memory.
        """
        origin = f"{self.origin}; messages as measured with gloo"
        return replace(self, origin=origin, round=0.0, ring_byte=0.0, fp16_byte=0.0, spread_byte=0.0)


PER_CORE = {
    "topk": Costs(encode=0.53e-9, commit=0.58e-9, write=0.20e-9, add=3.8e-9),
    "randomk": Costs(encode=0.38e-9, commit=0.57e-9, write=0.24e-9),
    "quantize": Costs(encode=0.43e-9, commit=0.70e-9, write=0.23e-9, add=0.12e-9),
}
"""Costs on one core, by compressor. Here `add` is per element that is sent. `thinwire plan --codec here` measures the
costs on the machine where it runs."""
ACCELERATOR = {
    "topk": Costs(encode=2.81e-12, commit=2.85e-12, write=0.97e-12, add=64 * 0.0233e-12),
    "quantize": Costs(encode=3.07e-12, commit=2.85e-12, write=3.07e-12, add=3.07e-12),
}
"""Costs on an H200: see docs/gpu.md and benchmarks/results/codec-h200.jsonl. The two halves of quantize's compress, and
its decoding, were not measured. Encode and decode are assumed to be as slow as both halves in one pass, which moves
more bytes. Commit is assumed to cost as much as that of topk."""
_HALVES_PER_CORE, _HALVES_ACCELERATOR = Costs(0.34e-9, 0.0, 0.21e-9), Costs(2.9e-12, 0.0, 2.9e-12)
"""Costs of the cast to 16 bits and back. On the accelerator: costs of a float32 copy, which moves more bytes."""
ONE_CORE = Speeds(
    origin="as measured on one core of an AMD EPYC", codecs={}, halves=_HALVES_PER_CORE,
    operation=4.5e-4, transfer=8e-4, message=1.2e-4, round=2.5e-4,
    ring_byte=0.8e-9, fp16_byte=1.7e-9, spread_byte=1.2e-9,
)  # fmt: skip
"""Measured with gloo between 2 to 24 ranks on two cores, over the links of `benchmarks link`."""


def parse_specs(specs: tuple[str, ...]) -> dict[str, Compressor]:
    """Return the compressor of each spec; raise ValueError for an invalid spec, and for "none"."""
    made = {spec: compressor(spec) for spec in specs}
    for spec, given in made.items():
        if isinstance(given, NoCompression):
            raise ValueError(f"--specs {spec}, which is compared anyway, as dense; expected {', '.join(PER_CORE)}")
    return made


def known_speeds(made: Iterable[Compressor], *, on_gpu: bool) -> Speeds:
    """Return the costs on one core of an AMD EPYC, or on an H200, with those of messages as measured with gloo."""
    table, origin = (ACCELERATOR, "as measured on an H200") if on_gpu else (PER_CORE, ONE_CORE.origin)
    codecs = {}
    for given in made:
        if given.name not in table:
            raise ValueError(
                f"--specs {format_spec(given)}: there is no figure for {given.name} {origin}; expected one of "
                f"{', '.join(table)}, or a speed, such as --codec 20e9"
            )
        costs = table[given.name]
        codecs[given] = costs._replace(add=costs.add * density(given))
    found = replace(ONE_CORE, origin=origin, codecs=codecs)
    return replace(found, halves=_HALVES_ACCELERATOR).by_accelerator() if on_gpu else found


def density(given: Compressor) -> float:
    """Return the share of elements that are sent.

    >>> from thinwire.compressors import compressor
    >>> density(compressor("topk:ratio=1/64,bits=2")), density(compressor("quantize:bits=8"))
    (0.015625, 1.0)
    """
    return float(getattr(given, "ratio", 1.0)) if given.sparse else 1.0
