"""Define the ways to reduce gradients that are compared, and the phases of each way for a bucket.

A way is a compressor with an algorithm, or an all-reduce of torch with 32 or 16 bits. A compressed exchange consists of
a few phases, one after the other: compute, transfer, compute, transfer. The work after its last transfer (residual and
result) waits until all buckets of the step have been exchanged: see sync/step.py.
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
"""DDP's own all-reduce, and DDP with a hook that sends 16 bits. The names are those of `thinwire bench link`."""
HALVES = (FP16, BF16)
GLOO_AT_ONCE = 2
_FLOAT = torch.float32

Route = Literal["ring", "spread", "between", "inside"]
"""Destination of a transfer: a neighbour, all ranks, the peers in other nodes, or the ranks of the same node."""


class Compute(NamedTuple):
    """Phase in which a rank computes."""

    seconds: float


class Transfer(NamedTuple):
    """Phase in which ranks exchange bytes."""

    route: Route
    nbytes: float
    """Bytes that each rank sends; it receives as many."""
    rounds: int
    """Number of messages that wait for each other."""
    handling: float
    """CPU seconds of each rank."""


Phase = Compute | Transfer


class Operation(NamedTuple):
    """One exchange: its phases, and the work that remains after them."""

    phases: tuple[Phase, ...]
    commit: float = 0.0
    write: float = 0.0
    """`commit` and `write` are the seconds to write residual and result, after all buckets have been exchanged."""


@dataclass(frozen=True)
class Way:
    """A way to reduce gradients: what is sent, and with which algorithm."""

    spec: str
    """Spec of a compressor, or `DENSE`, or one of `HALVES`."""
    algorithm: str
    """One of ring, gather, sharded, values and dense."""
    in_hosts: bool = False
    """Whether the way is hierarchical: dense inside a node, and `algorithm` between nodes."""
    mode: str = ""
    """attach if DDP's hook compresses, thinwire.AdamW or thinwire.SGD if the optimizer does; else empty."""

    @property
    def name(self) -> str:
        """Return the name in `thinwire bench link`, which does not include the algorithm."""
        return f"{self.mode} {self.spec}".strip()

    @property
    def compresses(self) -> bool:
        """Return whether the way uses a compressor."""
        return self.spec not in (DENSE, *HALVES)

    @property
    def shown_algorithm(self) -> str:
        """Return the name of the algorithm for the user."""
        return f"hierarchical, {self.algorithm}" if self.in_hosts else self.algorithm

    @property
    def at_once(self) -> int:
        """Return the number of operations that run at the same time."""
        return AT_ONCE if self.compresses else GLOO_AT_ONCE


def ways(specs: dict[str, Compressor], cluster: Cluster) -> list[Way]:
    """Return all ways to compare: dense first, then 16 bits, then each compressor with each algorithm."""
    halves = HALVES if cluster.trees else (FP16,)  # torch's hook for bf16 requires NCCL
    found = [Way(spec, "ring") for spec in (DENSE, *halves)]
    for spec, given in specs.items():
        mode = "thinwire.AdamW" if given.sparse else "attach"
        algorithms = ["values"] if summable(given) else ["gather", "sharded"]
        found += [Way(spec, algorithm, False, mode) for algorithm in algorithms]
        if 1 < cluster.ranks_per_host < cluster.world:
            found += [Way(spec, algorithm, True, mode) for algorithm in algorithms]
    return found


def summable(given: Compressor) -> bool:
    """Return whether payloads can be summed without decoding, because all ranks keep the same positions."""
    return given.layout(1 << 20, _FLOAT).summable


def is_auto(way: Way, given: Compressor, work: Work, cluster: Cluster) -> bool:
    """Return whether algorithm="auto" would choose the algorithm of this way for the largest bucket."""
    inside = cluster.ranks_per_host if way.in_hosts else 1
    largest = max(bucket.entries for bucket in work.buckets)
    return auto(given, cluster.world // inside, -(-largest // inside)) == way.algorithm


def auto(given: Compressor, ranks: int, entries: int) -> str:
    """Return the algorithm that algorithm="auto" chooses for a bucket of `entries` elements."""
    return choose("auto", given, given.for_sum(ranks), entries, _FLOAT, ranks, can_shard=given.contracts)[0]


def operations(
    way: Way, given: Compressor | None, bucket: Bucket, cluster: Cluster, speeds: Speeds
) -> tuple[Operation, ...]:
    """Return the exchanges of a bucket, in the order in which they are issued."""
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
    """Return the exchange of one algorithm between `ranks` ranks: see collectives/algorithms."""
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
    if algorithm == "dense":  # so few elements that compression would not pay off
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
    """Return a hierarchical exchange: see collectives/algorithms/hierarchical.py.

    It is dense inside a node. Between nodes each rank runs the algorithm for its share of the elements.
    """
    inside = cluster.ranks_per_host
    share = -(-entries // inside)
    between = _stage(algorithm, given, share, cluster.hosts, "between", costs, speeds)
    half = _transfer("inside", _FLOAT.itemsize * entries * (inside - 1) / inside, inside, speeds)
    summed, result = Compute(speeds.halves.write * entries), Compute(between.write)
    return Operation((half, summed, *between.phases, result, half), between.commit, speeds.halves.write * entries)


def _transfer(route: Route, nbytes: float, ranks: int, speeds: Speeds) -> Transfer:
    handling = speeds.spread_byte * nbytes + speeds.transfer + speeds.message * (ranks - 1)
    return Transfer(route, nbytes, 1, handling)
