"""Predict the time of a step, its bytes and its memory, for identical ranks that each have a link of their own.

    main     forward and optimizer, then the backward pass, which completes one bucket after the other
    codec    compression of one slice at a time
    wire     transfers, one after the other; the messages of one transfer travel at the same time

The exchange of a bucket begins when the backward pass has completed the bucket, and all earlier exchanges except the
last few are done. Its phases run one after the other, each in the first free interval of its resource. After all
exchanges have ended, residuals and results are written. If the backward pass shares a CPU with codec and wire, it takes
longer by the time of their work.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from thinwire.collectives.transport.wire import AT_ONCE

from .costs import Costs, Speeds
from .methods import Exchange, Method, Transfer, exchange
from .options import Cluster

_BACKWARD_SHARE = 2 / 3  # Share of a step without communication that the backward pass is assumed to take
_MOMENTS = 2  # Moments of Adam: torch keeps them in the dtype of the parameters, thinwire in float32
_ENDLESS, _DDP_AT_ONCE = 1e18, 2
"""A rate at which bytes take no time, and the number of all-reduces of DDP that run at the same time."""
PARTS = ("compute", "codec", "bandwidth", "latency", "messages")
"""What a step may be limited by. Messages take CPU time for sending and receiving."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time, bytes and memory of a step of one rank."""

    method: Method
    algorithm: str  # Algorithm by which the largest bucket is reduced
    seconds: float
    sent: float
    messages: int
    residual: float  # Bytes kept from step to step, including the residual of the sums that the rank owns
    buffers: int  # Bytes used during the step besides gradients and residual
    fits: bool  # Whether the memory of a rank, if it is known, is large enough


@dataclass(frozen=True)
class Case:
    """A model on a cluster: all inputs of a prediction except the method."""

    buckets: tuple[int, ...]
    """Number of elements of each bucket, in the order in which the backward pass completes them."""
    compute: float  # Seconds of a step without communication
    cluster: Cluster
    speeds: Speeds
    dtype: torch.dtype = torch.float32  # dtype of the gradients
    shard: int = 1  # Ranks of a replica, each of which holds a share of the model; 1 if it is not sharded
    memory: float | None = None  # Bytes of memory of a rank; None if it is not known

    @cached_property
    def numel(self) -> int:
        return sum(self.buckets)

    def predict(self, method: Method) -> Prediction:
        """Predict the time, the bytes and the memory of a step."""
        costs = [one.cost for one in self._exchanges(method)]
        algorithm = method.algorithm(max(self.buckets), self.cluster.world, self.dtype)
        buffers = sum(cost.memory for cost in costs)
        copies = 0.0 if method.compressor is None else 1 + 1 / self.cluster.world if algorithm == "sharded" else 1.0
        residual = 4 * copies * self.numel
        return Prediction(
            method=method,
            algorithm=algorithm,
            seconds=self.seconds(method),
            sent=sum(cost.sent for cost in costs),
            messages=sum(cost.messages for cost in costs),
            residual=residual,
            buffers=buffers,
            fits=self.has_room(method, residual + buffers),
        )

    def has_room(self, method: Method, nbytes: float) -> bool:
        """Return whether so many bytes fit the memory of a rank, if that is known, beside what training takes."""
        return self.memory is None or self.training_bytes(method) + nbytes <= self.memory

    def training_bytes(self, method: Method) -> int:
        """Return the bytes of weights, gradients and Adam's moments of a rank, without compression."""
        itemsize = self.dtype.itemsize
        moment = max(4, itemsize) if method.name.startswith("thinwire.") else itemsize
        return (2 * itemsize + _MOMENTS * moment) * self.numel

    def seconds(self, method: Method) -> float:
        """Predict the seconds of a step."""
        backward = _BACKWARD_SHARE * self.compute
        cores, now, apply = self.cluster.cores, self.compute - backward, 0.0
        at_once = AT_ONCE if method.compressor is not None else _DDP_AT_ONCE
        codec, wire = list[tuple[float, float]](), list[tuple[float, float]]()
        work = 0.0  # CPU time of exchanges that has not slowed down the backward pass yet
        done: list[float] = []
        for numel, sent in zip(self.buckets, self._exchanges(method), strict=True):
            alone = backward * numel / self.numel
            now, work = now + alone + (0.0 if cores is None else min(alone, work)), 0.0
            at = max(now, done[-at_once] if len(done) >= at_once else 0.0)
            for phase in sent.phases:
                if isinstance(phase, Transfer):
                    at = take(wire, at, phase.busy) + phase.beyond
                    work += phase.handling / (cores or 1)
                else:
                    at = take(codec, at, phase)
                    work += phase
            done.append(at)
            apply += sent.apply
        return max(now, *done) + apply

    def _exchanges(self, method: Method) -> list[Exchange]:
        """Return the exchange of each bucket."""
        made = {numel: exchange(method, numel, self.cluster, self.speeds, self.dtype) for numel in set(self.buckets)}
        return [made[numel] for numel in self.buckets]

    def limited_by(self, method: Method) -> str:
        """Return which of `PARTS` would make the step fastest if it cost nothing."""
        return min(PARTS, key=lambda part: self.without(part).seconds(method))

    def without(self, part: str) -> "Case":
        """Return a copy in which one of `PARTS` costs nothing."""
        if part == "compute":
            return replace(self, compute=0.0)
        if part in ("bandwidth", "latency"):
            return self.at(rate=_ENDLESS) if part == "bandwidth" else self.at(latency=0.0)
        free: dict[str, Any] = {"codecs": dict.fromkeys(self.speeds.codecs, Costs()), "operation": 0.0}
        if part == "messages":
            free = dict.fromkeys(("transfer", "message", "round", "ring_byte", "fp16_byte", "spread_byte"), 0.0)
        return replace(self, speeds=replace(self.speeds, **free))

    def at(self, **changes: Any) -> "Case":
        """Return a copy with other values of the cluster, such as another rate."""
        return replace(self, cluster=replace(self.cluster, **changes))


def take(taken: list[tuple[float, float]], at: float, seconds: float) -> float:
    """Reserve the first free interval of this length that starts at `at` or later, and return its end.

    taken   busy intervals of a resource that does one thing at a time.

    >>> taken = []
    >>> take(taken, 0.0, 2.0), take(taken, 5.0, 2.0), take(taken, 1.0, 3.0), take(taken, 1.0, 3.0)
    (2.0, 7.0, 5.0, 10.0)
    """
    if seconds <= 0:
        return at
    index = bisect_right(taken, (at, math.inf))
    start = max(at, taken[index - 1][1]) if index else at
    while index < len(taken) and taken[index][0] - start < seconds:
        start = taken[index][1]
        index += 1
    taken.insert(index, (start, start + seconds))
    return start + seconds
