"""The methods that are compared, and what each computes and sends for a bucket.

A method is DDP's all-reduce with 32 or 16 bits, or a compressor of thinwire with an algorithm. A compressed exchange
consists of a few phases, one after the other: compute, transfer, compute, transfer. The work after its last transfer
(residual and result) waits until all buckets of the step have been exchanged: see sync/step.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

import torch

from thinwire.collectives import cost
from thinwire.collectives.plan import choose
from thinwire.collectives.transport.wire import AT_ONCE
from thinwire.compressors import Compressor, NoCompression, compressor
from thinwire.sync.policy import AUTO, DEFAULT, default_compressor

from .cluster import Cluster, Transfer
from .costs import SMALL_COMPRESSOR, Bucket, Costs, Speeds, density
from .shared import COMPRESSING

DENSE, BF16, FP16 = "dense", "bf16", "fp16 hook"
"""DDP's own all-reduce, and DDP with a hook that sends 16 bits. The names are those of `benchmarks link`."""
HALVES = (BF16, FP16)
_GLOO_AT_ONCE = 2


@dataclass(frozen=True)
class Method:
    """A method to train: its name in `benchmarks link`, and its compressor, or None if torch's DDP sends."""

    name: str
    compressor: Compressor | None = None
    given: str = "auto"
    """Value of the argument `algorithm`. By "auto" the library chooses, for the fewest bytes."""

    @property
    def at_once(self) -> int:
        """Return the number of exchanges that run at the same time."""
        return AT_ONCE if self.compressor is not None else _GLOO_AT_ONCE

    def algorithm(self, numel: int, world: int, dtype: torch.dtype = torch.float32) -> str:
        """Return the algorithm by which the library reduces a slice of this size: see `make_request`.

        A Synchronizer keeps the residual of owners for every compressor that has one, so it may always shard.
        """
        if self.compressor is None:
            return "ring"
        second = self.compressor.for_sum(world)
        return choose(
            self.given, first=self.compressor, second=second, numel=numel, dtype=dtype, ranks=world, can_shard=True
        )[0]


def method_of(name: str, world: int) -> Method | None:
    """Return the method with this name in `benchmarks link`, or None if it cannot be predicted.

    Not predicted are methods that are not thinwire's or DDP's own, and the spec "auto", which chooses by measuring.
    """
    if name in (DENSE, *HALVES):
        return Method(name)
    kind, _, spec = name.partition(" ")
    if kind not in COMPRESSING or spec == AUTO:
        return None
    given = default_compressor(world) if spec == DEFAULT else compressor(spec)
    return Method(DENSE) if isinstance(given, NoCompression) else Method(name, given)


def methods_for(made: Mapping[str, Compressor], *, nccl: bool, dtype: torch.dtype = torch.float32) -> list[Method]:
    """Return the methods to compare: dense first, then 16 bits, then each compressor as it is best used."""
    # torch's hook for bf16 requires NCCL. Gradients of 16 bits are dense already.
    halves = [] if dtype.itemsize < 4 else [*HALVES] if nccl else [FP16]
    ours = [Method(f"{'thinwire.AdamW' if one.sparse else 'attach'} {spec}", one) for spec, one in made.items()]
    return [*map(Method, (DENSE, *halves)), *ours]


class Exchange(NamedTuple):
    """One exchange: its phases, the work that remains after them, and its bytes, messages and memory."""

    phases: tuple[float | Transfer, ...]
    """Seconds in which the rank computes, or a transfer."""
    cost: cost.Cost
    apply: float = 0.0
    """Seconds to write residual and result, after all buckets have been exchanged."""


def exchanges(
    method: Method, bucket: Bucket, cluster: Cluster, speeds: Speeds, dtype: torch.dtype = torch.float32
) -> list[Exchange]:
    """Return the exchanges of a bucket, in the order in which they are issued."""
    if method.compressor is None:
        return [_ring(method, bucket.numel, cluster=cluster, speeds=speeds, dtype=dtype)]
    # Small parameters are so few that encoding them takes no time.
    slices = (
        (Method("", SMALL_COMPRESSOR), bucket.small, Costs()),
        (method, bucket.compressed, speeds.codecs[method.compressor]),
    )
    return [
        _compressed(given, numel, world=cluster.world, costs=costs, speeds=speeds, dtype=dtype)
        for given, numel, costs in slices
        if numel
    ]


def _ring(method: Method, numel: int, *, cluster: Cluster, speeds: Speeds, dtype: torch.dtype) -> Exchange:
    is_half, rounds = method.name in HALVES, 2 * (cluster.world - 1)  # messages that wait for each other
    if cluster.nccl:  # it may use trees
        rounds = min(rounds, 2 * ceil(log2(cluster.world)))
    nbytes = cost.ring(numel * (2 if is_half else dtype.itemsize), cluster.world)
    byte = speeds.fp16_byte if method.name == FP16 else speeds.ring_byte
    sent = Transfer(route="ring", nbytes=nbytes, rounds=rounds, handling=byte * nbytes + speeds.round * rounds)
    used = cost.Cost(nbytes, 2 * (cluster.world - 1), 2 * numel if is_half else 0)
    if not is_half:
        return Exchange((sent,), used)
    return Exchange((speeds.halves.encode * numel, sent, speeds.halves.write * numel), used)


def _compressed(
    method: Method, numel: int, *, world: int, costs: Costs, speeds: Speeds, dtype: torch.dtype
) -> Exchange:
    """Return the exchange of one slice: see collectives/algorithms."""
    given = method.compressor
    assert given is not None
    algorithm, second = method.algorithm(numel, world, dtype), given.for_sum(world)
    used = cost.of(algorithm, first=given, second=second, numel=numel, dtype=dtype, ranks=world)

    def transfer(nbytes: float) -> Transfer:
        handling = speeds.spread_byte * nbytes + speeds.transfer + speeds.message * (world - 1)
        return Transfer(route="spread", nbytes=nbytes, rounds=1, handling=handling)

    begin = speeds.operation + costs.encode * numel
    half, share = transfer(used.sent / 2), numel / world
    if algorithm == "gather":
        return Exchange((begin, transfer(used.sent)), used, (costs.commit + costs.decode(world)) * numel)
    if algorithm == "values":
        summed = speeds.halves.write * density(given) * numel
        return Exchange((begin, half, summed, half), used, (costs.commit + costs.write) * numel)
    if algorithm == "dense":  # so few elements that compression would not pay off
        return Exchange((speeds.operation, half, half), used)
    assert algorithm == "sharded", algorithm
    pieces = given.nbytes(numel, dtype) * (world - 1) / world
    again = (costs.decode(world) + costs.encode) * share
    denser = density(second) / density(given)
    apply = costs.commit * (numel + share) + costs.decode(1, denser) * numel
    return Exchange((begin, transfer(pieces), again, transfer(used.sent - pieces)), used, apply)
