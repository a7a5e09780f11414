"""The prediction: a step's time from sums and maxima over its buckets, for ranks that are all alike.

    main     forward, then the backward pass, which completes one bucket after the other, then the optimizer
    codec    compression, of one operation at a time
    wire     transfers, one after the other; messages of one transfer travel at the same time

A bucket's operation begins when the backward pass has completed it (and of those before it, all but the last few are
done), passes its phases, each where there is room for it, and ends with its last transfer. When all have ended,
residuals and results are written, and the optimizer steps. Where codec and backward pass share a processor, each slows
the other.

What it leaves out is for `simulate`: ranks that differ, switches that cannot carry everything, and operations that
overtake each other between their transfers.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.compressors import Compressor, compressor

from .cluster import Cluster
from .costs import Speeds
from .footprint import Footprint, footprint
from .lane import Lane
from .ways import Compute, Operation, Transfer, Way, operations
from .work import Bucket, Work


@dataclass(frozen=True)
class Prediction:
    way: Way
    seconds: float
    """Of a step."""
    footprint: Footprint


@dataclass(frozen=True)
class Case:
    """A model on a cluster: everything that is known before a way is chosen."""

    work: Work
    cluster: Cluster
    speeds: Speeds

    def predict(self, way: Way) -> Prediction:
        given = compressor(way.spec) if way.compresses else None
        return Prediction(way, self._seconds(way, given), footprint(way, given, self.work, self.cluster))

    def seconds(self, way: Way) -> float:
        return self._seconds(way, compressor(way.spec) if way.compresses else None)

    def _seconds(self, way: Way, given: Compressor | None) -> float:
        work, cluster = self.work, self.cluster
        main, settle = work.forward, 0.0
        codec, outside, inside = Lane(), Lane(), Lane()
        handling = 0.0  # of transfers, which the backward pass has not felt yet
        done: list[float] = []
        known: dict[Bucket, tuple[Operation, ...]] = {}
        for bucket in work.buckets:
            alone = work.backward * bucket.entries / work.entries
            slower = cluster.codec_slows * codec.busy(main, main + alone)
            codec.take(main, slower)
            main += alone + slower + cluster.wire_slows * min(alone, handling)
            handling = 0.0
            if bucket not in known:
                known[bucket] = operations(way, given, bucket, cluster, self.speeds)
            for operation in known[bucket]:
                at = max(main, done[-way.at_once] if len(done) >= way.at_once else 0.0)
                for phase in operation.phases:
                    if isinstance(phase, Compute):
                        at = codec.take(at, phase.seconds)
                    else:
                        wire = inside if phase.route == "inside" else outside
                        busy, beyond = seconds_of(phase, cluster)
                        at = wire.take(at, busy) + beyond
                        handling += phase.handling
                done.append(at)
                settle += operation.commit + operation.write
        extra = self.speeds.extras.get(way.name, 0.0) * work.entries
        return max(main, codec.end, *done) + settle + work.optimizer + extra


class Occupied(NamedTuple):
    """Seconds of a transfer."""

    busy: float
    """That the wire is taken, by the ranks of a host together."""
    beyond: float
    """From then on until everything has arrived."""


def seconds_of(transfer: Transfer, cluster: Cluster) -> Occupied:
    """Handling bytes goes on beside their transfer, but a pipeline of few segments hides neither behind the other: with
    both alike, it takes half as long again. Where processors are to spare, each operation has one of its own for it,
    and the wire is free for others meanwhile."""
    link = link_seconds(transfer, cluster)
    whole, latency = math.hypot(link, transfer.handling), transfer.rounds * cluster.latency
    return Occupied(whole, latency) if cluster.wire_slows else Occupied(link, whole - link + latency)


def link_seconds(transfer: Transfer, cluster: Cluster) -> float:
    """Of the link alone."""
    return {
        "ring": cluster.ring_seconds,
        "spread": cluster.spread_seconds,
        "between": cluster.between_seconds,
        "inside": cluster.inside_seconds,
    }[transfer.route](transfer.nbytes)
