"""The ways to reduce that are compared: what each sends and computes, as a list of phases for each bucket.

An exchange of thinwire's is a few phases, one after the other: compute, transfer, compute, transfer. What comes after
its last transfer (the residual, the result) waits until all buckets of the step have been exchanged: see step.py.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from thinwire.collectives import cost
from thinwire.collectives.plan import AT_ONCE, choose
from thinwire.compressors import Compressor

from .cluster import Cluster
from .costs import Costs, Speeds, density
from .work import SMALL_COMPRESSOR, Bucket, Work

DENSE, FP16, BF16 = "dense", "fp16 hook", "bf16"
"""DDP's own all-reduce, and with hooks that send 16 bits; named as `thinwire bench link` names them."""
HALVES = (FP16, BF16)
GLOO_AT_ONCE = 2
_FLOAT = torch.float32

Route = Literal["ring", "spread", "between", "inside"]
"""To a neighbour; to all ranks; to the peers in other hosts; to the ranks of the same host."""


class Compute(NamedTuple):
    seconds: float


class Transfer(NamedTuple):
    route: Route
    nbytes: float
    """Sent by each rank, and received."""
    rounds: int
    """Messages that wait for each other."""
    handling: float
    """Seconds of each rank's processor."""


Phase = Compute | Transfer


class Operation(NamedTuple):
    phases: tuple[Phase, ...]
    commit: float = 0.0
    write: float = 0.0
    """Seconds, both, once the whole step has been exchanged."""


@dataclass(frozen=True)
class Way:
    """What is sent, and by which algorithm."""

    spec: str
    """Of a compressor, or `DENSE`, or one of `HALVES`."""
    algorithm: str
    """ring, gather, sharded, values or dense."""
    in_hosts: bool = False
    """hierarchical: dense inside a host, and this algorithm between them."""
    mode: str = ""
    """attach, thinwire.AdamW or thinwire.SGD: who compresses, DDP's hook or the optimizer."""

    @property
    def name(self) -> str:
        """Without the algorithm, as `thinwire bench link` has it."""
        return f"{self.mode} {self.spec}".strip()

    @property
    def compresses(self) -> bool:
        return self.spec not in (DENSE, *HALVES)

    @property
    def shown_algorithm(self) -> str:
        return f"hierarchical, {self.algorithm}" if self.in_hosts else self.algorithm

    @property
    def at_once(self) -> int:
        """Operations under way at a time."""
        return AT_ONCE if self.compresses else GLOO_AT_ONCE


def ways(specs: dict[str, Compressor], cluster: Cluster) -> list[Way]:
    """Everything that there is to compare: dense first, then halves, then each compressor by each algorithm."""
    halves = HALVES if cluster.trees else (FP16,)  # torch's hook for bf16 asks for NCCL
    found = [Way(spec, "ring") for spec in (DENSE, *halves)]
    for spec, given in specs.items():
        mode = "thinwire.AdamW" if given.sparse else "attach"
        algorithms = ["values"] if summable(given) else ["gather", "sharded"]
        found += [Way(spec, algorithm, False, mode) for algorithm in algorithms]
        if 1 < cluster.ranks_per_host < cluster.world:
            found += [Way(spec, algorithm, True, mode) for algorithm in algorithms]
    return found


def summable(given: Compressor) -> bool:
    return given.layout(1 << 20, _FLOAT).summable


def is_auto(way: Way, given: Compressor, work: Work, cluster: Cluster) -> bool:
    """Whether it is what algorithm="auto" would take, for the largest bucket."""
    inside = cluster.ranks_per_host if way.in_hosts else 1
    largest = max(bucket.entries for bucket in work.buckets)
    return auto(given, cluster.world // inside, -(-largest // inside)) == way.algorithm


def auto(given: Compressor, ranks: int, entries: int) -> str:
    """What algorithm="auto" takes for such a bucket."""
    return choose("auto", given, given.for_sum(ranks), entries, _FLOAT, ranks, can_shard=given.contracts)[0]


def operations(
    way: Way, given: Compressor | None, bucket: Bucket, cluster: Cluster, speeds: Speeds
) -> tuple[Operation, ...]:
    """A bucket's exchanges, in the order in which they are issued."""
    if given is None:
        return (_ring(way, bucket, cluster, speeds),)
    parts = ((bucket.small, "small"), (bucket.compressed, way.algorithm))
    make = _in_hosts if way.in_hosts else _flat
    costs = speeds.codecs[way.spec]
    return tuple(make(algorithm, given, count, cluster, costs, speeds) for count, algorithm in parts if count)


def _ring(way: Way, bucket: Bucket, cluster: Cluster, speeds: Speeds) -> Operation:
    entries, world = bucket.entries, cluster.world
    nbytes = cost.ring(entries * (2 if way.spec in HALVES else 4), world)
    rounds = cluster.ring_rounds
    byte = speeds.fp16_byte if way.spec == FP16 else speeds.ring_byte
    sent = Transfer("ring", nbytes, rounds, byte * nbytes + speeds.round * rounds)
    if way.spec == DENSE:
        return Operation((sent,))
    return Operation((Compute(speeds.halves.encode * entries), sent, Compute(speeds.halves.write * entries)))


def _flat(algorithm: str, given: Compressor, entries: int, cluster: Cluster, costs: Costs, speeds: Speeds) -> Operation:
    return _stage(algorithm, given, entries, cluster.world, "spread", costs, speeds)


def _stage(
    algorithm: str, given: Compressor, entries: int, ranks: int, route: Route, costs: Costs, speeds: Speeds
) -> Operation:
    """One algorithm between so many ranks: see collectives/gather.py, sharded.py and values.py."""
    if algorithm == "small":  # parameters so small that encoding them takes no time
        by = auto(SMALL_COMPRESSOR, ranks, entries)
        nbytes = cost.of(by, SMALL_COMPRESSOR, SMALL_COMPRESSOR, entries, _FLOAT, ranks).sent
        if by == "gather":
            return Operation((Compute(speeds.operation), _transfer(route, nbytes, ranks, speeds)))
        half = _transfer(route, nbytes / 2, ranks, speeds)
        return Operation((Compute(speeds.operation), half, half))
    second = given.for_sum(ranks)
    sent = cost.of(algorithm, given, second, entries, _FLOAT, ranks).sent
    begin = Compute(speeds.operation + costs.encode * entries)
    share = entries / ranks
    if algorithm == "gather":
        return Operation(
            (begin, _transfer(route, sent, ranks, speeds)), costs.commit * entries, costs.decode(ranks) * entries
        )
    if algorithm == "values":
        kept = density(given) * share * ranks
        summed = Compute(speeds.halves.write * kept)
        half = _transfer(route, sent / 2, ranks, speeds)
        return Operation((begin, half, summed, half), costs.commit * entries, costs.write * entries)
    if algorithm == "dense":  # so few entries that compression would not pay
        half = _transfer(route, sent / 2, ranks, speeds)
        return Operation((Compute(speeds.operation), half, half))
    assert algorithm == "sharded", algorithm
    pieces = given.nbytes(entries, _FLOAT) * (ranks - 1) / ranks
    again = Compute((costs.decode(ranks) + costs.encode) * share)
    denser = density(second) / density(given)
    return Operation(
        (begin, _transfer(route, pieces, ranks, speeds), again, _transfer(route, sent - pieces, ranks, speeds)),
        costs.commit * (entries + share),
        costs.decode(1, denser) * entries,
    )


def _in_hosts(
    algorithm: str, given: Compressor, entries: int, cluster: Cluster, costs: Costs, speeds: Speeds
) -> Operation:
    """Dense inside a host, around the algorithm between hosts for a share: see collectives/hierarchical.py."""
    inside = cluster.ranks_per_host
    share = -(-entries // inside)
    between = _stage(algorithm, given, share, cluster.hosts, "between", costs, speeds)
    half = _transfer("inside", _FLOAT.itemsize * entries * (inside - 1) / inside, inside, speeds)
    summed, result = Compute(speeds.halves.write * entries), Compute(between.write)
    return Operation((half, summed, *between.phases, result, half), between.commit, speeds.halves.write * entries)


def _transfer(route: Route, nbytes: float, ranks: int, speeds: Speeds) -> Transfer:
    handling = speeds.spread_byte * nbytes + speeds.transfer + speeds.message * (ranks - 1)
    return Transfer(route, nbytes, 1, handling)
