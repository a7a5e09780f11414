"""Compute bytes, messages and memory of a way, with the formulas of the collectives (collectives/cost.py)."""

from dataclasses import dataclass

import torch

from thinwire.collectives import cost
from thinwire.collectives.plan import plan
from thinwire.compressors import Compressor

from .cluster import Cluster
from .ways import GLOO_AT_ONCE, HALVES, Way, auto
from .work import SMALL_COMPRESSOR, Bucket, Work

_FLOAT, _NO_LIMIT = torch.float32, 1 << 62


@dataclass(frozen=True)
class Footprint:
    """Bytes, messages and memory of one rank in one step."""

    sent: float
    inside: float
    """Part of `sent` that stays inside the node, in hierarchical ways."""
    messages: int
    residual: int
    """Bytes kept from step to step, including the residual of the sums that the rank owns."""
    buffers: int
    """Bytes used during the step besides gradients and residual."""


def footprint(way: Way, given: Compressor | None, work: Work, cluster: Cluster) -> Footprint:
    """Return the bytes, messages and memory of a way; `given` is its compressor, or None if it has none."""
    sent, messages, buffers = 0.0, 0, 0
    world = cluster.world
    known: dict[Bucket, cost.Cost] = {}
    for bucket in work.buckets:
        if bucket not in known:
            known[bucket] = _cost(way, given, bucket, cluster)
        sent, messages, buffers = (
            sent + known[bucket].sent,
            messages + known[bucket].messages,
            buffers + known[bucket].memory,
        )
    if given is None:  # the hooks cast those buckets to 16 bits that are being exchanged
        largest = max(bucket.entries for bucket in work.buckets)
        held = 2 * min(GLOO_AT_ONCE * largest, work.entries) if way.spec in HALVES else 0
        return Footprint(sent, 0.0, messages, 0, held)
    residual = _FLOAT.itemsize * work.entries if given.contracts else 0
    if way.algorithm == "sharded" and residual:
        residual += residual // world
    inside = cost.ring(_FLOAT.itemsize * work.entries, cluster.ranks_per_host) if way.in_hosts else 0
    return Footprint(sent, inside, messages, residual, buffers)


def _cost(way: Way, given: Compressor | None, bucket: Bucket, cluster: Cluster) -> cost.Cost:
    """Return the cost of one bucket; without a compressor, that of a ring all-reduce."""
    world, inside = cluster.world, cluster.ranks_per_host
    if given is None:
        nbytes = bucket.entries * (2 if way.spec in HALVES else 4)
        return cost.Cost(cost.ring(nbytes, world), 2 * (world - 1), 0)
    in_node, ranks = (inside, world // inside) if way.in_hosts else (1, world)
    made = [cost.Cost(0, 0, 0)]
    small_by = auto(SMALL_COMPRESSOR, ranks, bucket.small)
    parts = ((SMALL_COMPRESSOR, bucket.small, small_by), (given, bucket.compressed, way.algorithm))
    for first, count, algorithm in parts:
        if count:
            second = first.for_sum(ranks)
            made.append(plan(algorithm, "", first, second, count, _FLOAT, ranks, in_node, _NO_LIMIT).cost)
    return cost.Cost(sum(one.sent for one in made), sum(one.messages for one in made), sum(one.memory for one in made))
