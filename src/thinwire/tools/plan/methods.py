"""The methods that are compared, and what each computes and sends for a bucket.

A method is DDP's all-reduce with 32 or 16 bits, or a compressor of thinwire with the algorithm that algorithm="auto"
chooses. A compressed exchange consists of a few phases, one after the other: compute, transfer, compute, transfer. The
work after its last transfer (residual and result) waits until all buckets of the step have been exchanged: see
sync/step.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from thinwire.collectives import cost
from thinwire.collectives.plan import choose
from thinwire.collectives.transport.wire import AT_ONCE
from thinwire.compressors import Compressor, NoCompression, compressor
from thinwire.sync.policy import AUTO, DEFAULT, default_compressor
from thinwire.tools.bench.methods import COMPRESSING

from .costs import Costs, Speeds, density
from .work import SMALL_COMPRESSOR, Bucket

DENSE, BF16, FP16 = "dense", "bf16", "fp16 hook"
"""DDP's own all-reduce, and DDP with a hook that sends 16 bits. The names are those of `thinwire bench link`."""
HALVES = (BF16, FP16)
_GLOO_AT_ONCE = 2
_FLOAT = torch.float32
_FREE = Costs(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Method:
    """A method to train: its name in `thinwire bench link`, and its compressor, or None if torch's DDP sends."""

    name: str
    compressor: Compressor | None = None

    @property
    def at_once(self) -> int:
        """Return the number of exchanges that run at the same time."""
        return AT_ONCE if self.compressor is not None else _GLOO_AT_ONCE

    def algorithm(self, numel: int, world: int) -> str:
        """Return the algorithm by which the library reduces a slice of this size."""
        return "ring" if self.compressor is None else algorithm_of(self.compressor, numel, world)


def method_of(name: str, world: int) -> Method | None:
    """Return the method with this name in `thinwire bench link`, or None if it cannot be predicted.

    Not predicted are methods that are not thinwire's or DDP's own, and the spec "auto", which chooses by measuring.
    """
    if name in (DENSE, *HALVES):
        return Method(name)
    kind, _, spec = name.partition(" ")
    if kind not in COMPRESSING or spec == AUTO:
        return None
    given = default_compressor(world) if spec == DEFAULT else compressor(spec)
    return Method(DENSE) if isinstance(given, NoCompression) else Method(name, given)


def methods_for(made: Mapping[str, Compressor], *, nccl: bool) -> list[Method]:
    """Return the methods to compare: dense first, then 16 bits, then each compressor as it is best used."""
    halves = HALVES if nccl else (FP16,)  # torch's hook for bf16 requires NCCL
    ours = [Method(f"{'thinwire.AdamW' if one.sparse else 'attach'} {spec}", one) for spec, one in made.items()]
    return [*map(Method, (DENSE, *halves)), *ours]


def algorithm_of(given: Compressor, numel: int, world: int) -> str:
    """Return the algorithm that the library chooses for a slice: see `make_request`.

    A Synchronizer keeps the residual of owners for every compressor that has one, so it may always shard.
    """
    return choose(
        "auto", first=given, second=given.for_sum(world), numel=numel, dtype=_FLOAT, ranks=world, can_shard=True
    )[0]


class Compute(NamedTuple):
    """Phase in which a rank computes."""

    seconds: float


class Transfer(NamedTuple):
    """Phase in which ranks exchange bytes."""

    route: Literal["ring", "spread"]
    """Destination: a neighbour, or all other ranks."""
    nbytes: float
    """Bytes that each rank sends; it receives as many."""
    rounds: int
    """Number of messages that wait for each other."""
    handling: float
    """CPU seconds of each rank."""


class Exchange(NamedTuple):
    """One exchange: its phases, the work that remains after them, and its bytes, messages and memory."""

    phases: tuple[Compute | Transfer, ...]
    cost: cost.Cost
    apply: float = 0.0
    """Seconds to write residual and result, after all buckets have been exchanged."""


def exchanges(method: Method, bucket: Bucket, *, world: int, ring_rounds: int, speeds: Speeds) -> list[Exchange]:
    """Return the exchanges of a bucket, in the order in which they are issued."""
    if method.compressor is None:
        return [_ring(method, bucket.numel, world=world, rounds=ring_rounds, speeds=speeds)]
    # Small parameters are so few that encoding them takes no time.
    slices = ((SMALL_COMPRESSOR, bucket.small, _FREE), (method.compressor, bucket.compressed, None))
    return [
        _compressed(given, numel, world=world, costs=costs or speeds.codecs[given], speeds=speeds)
        for given, numel, costs in slices
        if numel
    ]


def _ring(method: Method, numel: int, *, world: int, rounds: int, speeds: Speeds) -> Exchange:
    is_half = method.name in HALVES
    nbytes = cost.ring(numel * (2 if is_half else 4), world)
    byte = speeds.fp16_byte if method.name == FP16 else speeds.ring_byte
    sent = Transfer(route="ring", nbytes=nbytes, rounds=rounds, handling=byte * nbytes + speeds.round * rounds)
    used = cost.Cost(nbytes, 2 * (world - 1), 2 * numel if is_half else 0)
    if not is_half:
        return Exchange((sent,), used)
    return Exchange((Compute(speeds.halves.encode * numel), sent, Compute(speeds.halves.write * numel)), used)


def _compressed(given: Compressor, numel: int, *, world: int, costs: Costs, speeds: Speeds) -> Exchange:
    """Return the exchange of one slice: see collectives/algorithms."""
    algorithm, second = algorithm_of(given, numel, world), given.for_sum(world)
    used = cost.of(algorithm, first=given, second=second, numel=numel, dtype=_FLOAT, ranks=world)

    def transfer(nbytes: float) -> Transfer:
        handling = speeds.spread_byte * nbytes + speeds.transfer + speeds.message * (world - 1)
        return Transfer(route="spread", nbytes=nbytes, rounds=1, handling=handling)

    begin = Compute(speeds.operation + costs.encode * numel)
    half, share = transfer(used.sent / 2), numel / world
    if algorithm == "gather":
        return Exchange((begin, transfer(used.sent)), used, (costs.commit + costs.decode(world)) * numel)
    if algorithm == "values":
        summed = Compute(speeds.halves.write * density(given) * numel)
        return Exchange((begin, half, summed, half), used, (costs.commit + costs.write) * numel)
    if algorithm == "dense":  # so few elements that compression would not pay off
        return Exchange((Compute(speeds.operation), half, half), used)
    assert algorithm == "sharded", algorithm
    pieces = given.nbytes(numel, _FLOAT) * (world - 1) / world
    again = Compute((costs.decode(world) + costs.encode) * share)
    denser = density(second) / density(given)
    apply = costs.commit * (numel + share) + costs.decode(1, denser) * numel
    return Exchange((begin, transfer(pieces), again, transfer(used.sent - pieces)), used, apply)
