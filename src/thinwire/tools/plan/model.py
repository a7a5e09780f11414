"""Predict the time of a step from sums and maxima over its buckets, for identical ranks.

    main     forward, then the backward pass, which completes one bucket after the other, then the optimizer
    codec    compression of one operation at a time
    wire     transfers, one after the other; the messages of one transfer travel at the same time

The operation of a bucket begins when the backward pass has completed the bucket, and all earlier operations except the
last few are done. Its phases run one after the other, each in the first free interval of its resource. After all
operations have ended, residuals and results are written, and the optimizer steps. If codec and backward pass share a
CPU, each slows down the other.

The model leaves out what `simulate` includes: ranks that differ, switches that cannot carry all traffic, and operations
that overtake each other between their transfers.
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
    """Predicted time and footprint of a step."""

    way: Way
    seconds: float
    """Seconds of a step."""
    footprint: Footprint


@dataclass(frozen=True)
class Case:
    """A model on a cluster: all inputs of a prediction except the way."""

    work: Work
    cluster: Cluster
    speeds: Speeds

    def predict(self, way: Way) -> Prediction:
        """Predict the time and the footprint of a step."""
        given = compressor(way.spec) if way.compresses else None
        return Prediction(way, self._seconds(way, given), footprint(way, given, self.work, self.cluster))

    def seconds(self, way: Way) -> float:
        """Predict the seconds of a step."""
        return self._seconds(way, compressor(way.spec) if way.compresses else None)

    def _seconds(self, way: Way, given: Compressor | None) -> float:
        work, cluster = self.work, self.cluster
        main, settle = work.forward, 0.0
        codec, outside, inside = Lane(), Lane(), Lane()
        handling = 0.0  # CPU time of transfers that has not slowed down the backward pass yet
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
    """Time that a transfer takes, in seconds."""

    busy: float
    """Seconds in which the wire is busy, for all ranks of a node together."""
    beyond: float
    """Seconds from then until all bytes have arrived."""


def seconds_of(transfer: Transfer, cluster: Cluster) -> Occupied:
    """Return the time that a transfer takes.

    Bytes are handled while others travel, but a pipeline of few segments does not fully overlap the two. The time is
    modelled as sqrt(link² + handling²): 1.4 times as long as either if both are equal. If `wire_slows` is 0, each
    operation has a CPU of its own for the handling, and the wire is free for other transfers in the meantime.
    """
    link = link_seconds(transfer, cluster)
    whole, latency = math.hypot(link, transfer.handling), transfer.rounds * cluster.latency
    return Occupied(whole, latency) if cluster.wire_slows else Occupied(link, whole - link + latency)


def link_seconds(transfer: Transfer, cluster: Cluster) -> float:
    """Return the seconds that the link alone takes for a transfer."""
    return {
        "ring": cluster.ring_seconds,
        "spread": cluster.spread_seconds,
        "between": cluster.between_seconds,
        "inside": cluster.inside_seconds,
    }[transfer.route](transfer.nbytes)
