"""Predict the time of a step, its bytes and its memory, for identical ranks that each have a link of their own.

    main     forward, then the backward pass, which completes one bucket after the other, then the optimizer
    codec    compression of one slice at a time
    wire     transfers, one after the other; the messages of one transfer travel at the same time

The exchange of a bucket begins when the backward pass has completed the bucket, and all earlier exchanges except the
last few are done. Its phases run one after the other, each in the first free interval of its resource. After all
exchanges have ended, residuals and results are written, and the optimizer steps. If codec and backward pass share a
CPU, each slows down the other.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from thinwire.collectives.plan import given_max_bytes
from thinwire.compressors import RandomK

from .cluster import Cluster, Transfer
from .costs import Bucket, Costs, Speeds, Work
from .methods import FP16, HALVES, Exchange, Method, exchanges

_MOMENTS = 2
"""Moments of Adam: torch keeps them in the dtype of the parameters, thinwire in float32."""
_CLEARLY = 0.99
"""Another algorithm than that of "auto" is preferred if it takes at most this share of the time."""
_ENDLESS = 1e18


@dataclass(frozen=True)
class Prediction:
    """Predicted time, bytes and memory of a step of one rank."""

    method: Method
    algorithm: str
    """Algorithm by which the largest bucket is reduced."""
    seconds: float
    sent: float
    messages: int
    residual: float
    """Bytes kept from step to step, including the residual of the sums that the rank owns."""
    buffers: int
    """Bytes used during the step besides gradients and residual."""
    fits: bool
    """Whether the memory of a rank, if it is known, and the limit THINWIRE_MAX_BYTES are large enough."""
    is_ddp_only: bool
    """Whether the method is a hook of DDP, for which FSDP has nothing in its place."""
    is_usable: bool
    """Whether it fits, and works with the model as it is, sharded or not."""


@dataclass(frozen=True)
class Case:
    """A model on a cluster: all inputs of a prediction except the method."""

    work: Work
    cluster: Cluster
    speeds: Speeds
    shard: int = 1
    """Ranks of a replica, each of which holds a share of the model; 1 if it is not sharded."""
    origin: str = ""
    """Where the time of a step without communication comes from, as text for the user."""

    def best(self, method: Method) -> Prediction:
        """Predict the method with the algorithm of "auto", or with another one that is clearly faster.

        "auto" counts bytes; where latency or messages cost more than bytes, another one is faster. It is taken if it
        is usable wherever that of "auto" is, and needs at most twice the memory.
        """
        first = self.predict(method)
        most, limit = 2 * (first.residual + first.buffers), _CLEARLY * first.seconds
        names = ("gather",) if isinstance(method.compressor, RandomK) else ("gather", "sharded")
        faster = [
            one
            for one in (self.predict(replace(method, given=name)) for name in names if method.compressor is not None)
            if one.seconds <= limit and one.residual + one.buffers <= most and one.is_usable >= first.is_usable
        ]
        return min(faster, key=lambda one: one.seconds, default=first)

    def predict(self, method: Method) -> Prediction:
        """Predict the time, the bytes and the memory of a step."""
        work, world = self.work, self.cluster.world
        found = self._exchanges(method)
        costs = [exchange.cost for bucket in work.buckets for exchange in found[bucket]]
        largest = max(bucket.numel for bucket in work.buckets)
        algorithm, residual = method.algorithm(largest, world, work.dtype), 0.0
        buffers = sum(cost.memory for cost in costs)
        if method.compressor is None:  # the hooks cast those buckets to 16 bits that are being exchanged
            most = method.at_once * max(cost.memory for cost in costs)
            buffers = min(most, buffers) if method.name in HALVES else 0
        else:
            residual = 4 * work.numel * (1 + (1 / world if algorithm == "sharded" else 0))
        limit, memory = given_max_bytes(None), self.cluster.memory
        within = limit is None or method.compressor is None or buffers <= limit
        fits = within and (memory is None or self.training_bytes(method) + residual + buffers <= memory)
        is_ddp_only = method.name == FP16  # bf16 is in FSDP's MixedPrecisionPolicy too
        return Prediction(
            method=method,
            algorithm=algorithm,
            seconds=self.seconds(method),
            sent=sum(cost.sent for cost in costs),
            messages=sum(cost.messages for cost in costs),
            residual=residual,
            buffers=buffers,
            fits=fits,
            is_ddp_only=is_ddp_only,
            is_usable=fits and not (is_ddp_only and self.shard > 1),
        )

    def training_bytes(self, method: Method) -> int:
        """Return the bytes of weights, gradients and Adam's moments of a rank, without compression."""
        itemsize = self.work.dtype.itemsize
        moment = max(4, itemsize) if method.name.startswith("thinwire.") else itemsize
        return (2 * itemsize + _MOMENTS * moment) * self.work.numel

    def limited_by(self, method: Method) -> str:
        """Return what would make the step fastest if it cost nothing: compute, codec, or a part of the network.

        That part is bandwidth, latency or messages: the CPU time for sending and receiving.
        """
        no_compute = replace(self.work, forward=0.0, backward=0.0, optimizer=0.0)
        no_network = self.without_network()
        free = dict.fromkeys(self.speeds.codecs, Costs())
        no_codec = replace(self.speeds, codecs=free, halves=Costs(), operation=0.0, extras={})
        parts = {
            "bandwidth": self.at(rate=_ENDLESS),
            "latency": self.at(latency=0.0),
            "messages": replace(self, speeds=no_network.speeds),
        }
        whole = {
            "compute": replace(self, work=no_compute),
            "codec": replace(self, speeds=no_codec),
            "network": no_network,
        }
        found = min(whole, key=lambda name: whole[name].seconds(method))
        return found if found != "network" else min(parts, key=lambda name: parts[name].seconds(method))

    def seconds(self, method: Method) -> float:
        """Predict the seconds of a step."""
        work, cluster = self.work, self.cluster
        main, apply = work.forward, 0.0
        codec, wire = Lane(), Lane()
        handling = 0.0  # CPU time of transfers that has not slowed down the backward pass yet
        done: list[float] = []
        found = self._exchanges(method)
        for bucket in work.buckets:
            alone = work.backward * bucket.numel / work.numel
            slower = cluster.codec_slows * codec.busy(main, main + alone)
            codec.take(main, slower)
            main += alone + slower + cluster.wire_slows * min(alone, handling)
            handling = 0.0
            for exchange in found[bucket]:
                at = max(main, done[-method.at_once] if len(done) >= method.at_once else 0.0)
                for phase in exchange.phases:
                    if isinstance(phase, Transfer):
                        busy, beyond = cluster.wire_seconds(phase)
                        at = wire.take(at, busy) + beyond
                        handling += phase.handling
                    else:
                        at = codec.take(at, phase)
                done.append(at)
                apply += exchange.apply
        extra = self.speeds.extras.get(method.name, 0.0) * work.numel
        return max(main, codec.end, *done) + apply + work.optimizer + extra

    def _exchanges(self, method: Method) -> dict[Bucket, list[Exchange]]:
        return {
            bucket: exchanges(method, bucket, self.cluster, self.speeds, self.work.dtype)
            for bucket in set(self.work.buckets)
        }

    def at(self, **changes: Any) -> "Case":
        """Return a copy with other values of the cluster, such as another rate."""
        return replace(self, cluster=replace(self.cluster, **changes))

    def without_network(self) -> "Case":
        """Return a copy in which bytes, latency and messages cost nothing."""
        free = replace(self.speeds, transfer=0.0, message=0.0, round=0.0, ring_byte=0.0, fp16_byte=0.0, spread_byte=0.0)
        return replace(self.at(rate=_ENDLESS, latency=0.0), speeds=free)


class Lane:
    """Busy intervals of a resource that does one thing at a time.

    >>> lane = Lane()
    >>> lane.take(0.0, 2.0), lane.take(5.0, 2.0), lane.take(1.0, 3.0), lane.take(1.0, 3.0)
    (2.0, 7.0, 5.0, 10.0)
    """

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    @property
    def end(self) -> float:
        """Return the end of the last busy interval, or 0 if there is none."""
        return self._taken[-1][1] if self._taken else 0.0

    def take(self, at: float, seconds: float) -> float:
        """Reserve the first free interval of this length that starts at `at` or later, and return its end."""
        if seconds <= 0:
            return at
        index = bisect_right(self._taken, (at, math.inf))
        start = max(at, self._taken[index - 1][1]) if index else at
        while index < len(self._taken) and self._taken[index][0] - start < seconds:
            start = self._taken[index][1]
            index += 1
        self._taken.insert(index, (start, start + seconds))
        return start + seconds

    def busy(self, start: float, stop: float) -> float:
        """Return the busy seconds between `start` and `stop`."""
        first = max(0, bisect_left(self._taken, (start, 0.0)) - 1)
        total = 0.0
        for begin, end in islice(self._taken, first, None):
            if begin >= stop:
                break
            total += max(0.0, min(end, stop) - max(begin, start))
        return total
