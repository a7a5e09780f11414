"""Simulate a step event by event: every rank, every bucket and every link, for thousands of ranks.

An event is the backward pass through one bucket, or one phase of one operation. All ranks take part in it, each at its
own time, so their times are one vector. Events run in order of time, and each link carries transfers in that order. The
simulation includes what `model` leaves out:

    jitter            ranks compute for different times, and every exchange waits for the slowest rank of its group
    oversubscription  the nodes of a switch can send more than the link of the switch carries
    overtaking        the second transfer of an operation waits for its ranks, while other operations use the wire

A transfer passes the link of the sender, the links of both switches and the link of the receiver as one stream. It has
arrived when the slowest of these links is done. Each link carries one transfer at a time. A rank has received a
transfer when the last sender is done, and its own link has carried its part.

If ranks are identical and one switch carries all traffic, the simulation and `model` agree (tests/plan).
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from thinwire.compressors import compressor

from .host import Host
from .model import Case, link_seconds, seconds_of
from .ways import Compute, Operation, Transfer, Way, operations
from .work import Bucket, Work

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Simulated:
    """Result of a simulation."""

    seconds: float
    """Seconds of a step, until the last rank is done."""
    events: int


def simulate(case: Case, way: Way, host: Host, seed: int = 0) -> Simulated:
    """Simulate one step, which all ranks start at the same time."""
    return _Step(case, way, host, seed).run()


class _Step:
    def __init__(self, case: Case, way: Way, host: Host, seed: int) -> None:
        self.case, self.way, self.cluster = case, way, case.cluster
        self.work: Work = case.work
        world, hosts = self.cluster.world, self.cluster.hosts
        drawn = np.random.default_rng(seed).standard_normal(world)
        self.pace: Times = np.maximum(0.5, 1 + host.jitter * drawn)
        self.main: Times = self.pace * self.work.forward
        self.codec, self.handled, self.finished = np.zeros(world), np.zeros(world), np.zeros(world)
        self.inside = np.zeros(hosts)
        self.network = _Network(case, host)
        self.settle = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = count()
        self.operations: list[Operation] = []
        self.known: dict[Bucket, tuple[Operation, ...]] = {}
        self.ready: dict[int, Times] = {}
        self.done: dict[int, Times] = {}

    def run(self) -> Simulated:
        self.post(0.0, lambda: self.compute(0))
        taken = 0
        while self.events:
            _, _, event = heapq.heappop(self.events)
            event()
            taken += 1
        extra = self.case.speeds.extras.get(self.way.name, 0.0) * self.work.entries
        ends = np.maximum(np.maximum(self.main, self.codec), self.finished)
        ends += self.settle + self.pace * (self.work.optimizer + extra)
        return Simulated(float(ends.max()), taken)

    def post(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.sequence), event))

    def compute(self, index: int) -> None:
        """Run the backward pass through one bucket, and post the exchange of the bucket."""
        bucket = self.work.buckets[index]
        alone = self.pace * (self.work.backward * bucket.entries / self.work.entries)
        coding = np.minimum(alone, np.maximum(0.0, self.codec - self.main))
        self.codec = self.codec + self.cluster.codec_slows * coding
        self.main = self.main + alone + self.cluster.codec_slows * coding
        self.main += self.cluster.wire_slows * np.minimum(alone, self.handled)
        self.handled = np.zeros_like(self.handled)
        now = float(self.main.min())
        self.post(now, lambda: self.issue(index, self.main))

    def issue(self, index: int, ready: Times) -> None:
        bucket = self.work.buckets[index]
        if bucket not in self.known:
            given = compressor(self.way.spec) if self.way.compresses else None
            self.known[bucket] = operations(self.way, given, bucket, self.cluster, self.case.speeds)
        for operation in self.known[bucket]:
            number = len(self.operations)
            self.operations.append(operation)
            self.settle += operation.commit + operation.write
            self.ready[number] = ready
            self.begin(number)
        if index + 1 < len(self.work.buckets):
            self.post(float(ready.min()), lambda: self.compute(index + 1))

    def begin(self, number: int) -> None:
        """Start an operation if it is ready, and if the operation `at_once` places before it is done."""
        before = number - self.way.at_once
        if number not in self.ready or (before >= 0 and before not in self.done):
            return
        at = self.ready.pop(number)
        if before >= 0:
            at = np.maximum(at, self.done.pop(before))
        self.advance(number, 0, at)

    def advance(self, number: int, position: int, at: Times) -> None:
        phases = self.operations[number].phases
        if position < len(phases):
            self.post(float(at.min()), lambda: self.take(number, position, at))
            return
        self.finished = np.maximum(self.finished, at)
        self.done[number] = at
        self.begin(number + self.way.at_once)

    def take(self, number: int, position: int, at: Times) -> None:
        phase = self.operations[number].phases[position]
        if isinstance(phase, Compute):
            at = self.codec = np.maximum(at, self.codec) + phase.seconds
        else:
            self.handled += phase.handling
            at = self.exchange(phase, at)
        self.advance(number, position + 1, at)

    def exchange(self, transfer: Transfer, at: Times) -> Times:
        busy, beyond = seconds_of(transfer, self.cluster)
        if transfer.route == "inside":
            start = np.maximum(at.reshape(self.cluster.hosts, -1).max(axis=1), self.inside)
            self.inside = start + busy
            return np.repeat(self.inside, self.cluster.ranks_per_host) + beyond
        if transfer.route == "ring":
            return np.full_like(at, self.network.ring(float(at.max()), busy)) + beyond
        arrived = self.network.spread(at, busy, link_seconds(transfer, self.cluster))
        return np.repeat(arrived, self.cluster.ranks_per_host) + beyond


class _Network:
    """Times at which each link of a node or a switch is free again, in each direction."""

    def __init__(self, case: Case, host: Host) -> None:
        self.cluster = case.cluster
        self.hosts = case.cluster.hosts
        self.up, self.down = np.zeros(self.hosts), np.zeros(self.hosts)
        self.per_switch = min(host.per_switch or self.hosts, self.hosts)
        self.switches = -(-self.hosts // self.per_switch)
        self.switch_up, self.switch_down = np.zeros(self.switches), np.zeros(self.switches)
        elsewhere = (self.hosts - self.per_switch) / max(1, self.hosts - 1)
        self.switch_slower = host.oversubscription * elsewhere
        """Time of a switch's link for the bytes that its nodes send to other switches, relative to a node's link."""
        self.ring_slower = max(1.0, host.oversubscription / self.per_switch) if self.switches > 1 else 1.0

    def ring(self, at: float, seconds: float) -> float:
        """Return the end of a ring transfer.

        All ranks wait for each other. Only neighbours at different switches use the links of the switches.
        """
        start = max(at, float(self.up.max()), float(self.down.max()))
        end = start + self.ring_slower * seconds
        self.up[:] = self.down[:] = end
        return end

    def spread(self, at: Times, seconds: float, link: float) -> Times:
        """Return the times at which each node has received the bytes of all other nodes.

        seconds   time of the transfer for all ranks of a node together.
        link      part of it that the link alone takes. Only this part counts for switches, which do not handle bytes.
        """
        ranks = self.cluster.ranks_per_host
        by_host = np.sort(at.reshape(self.hosts, ranks), axis=1)
        for rank in range(ranks):
            self.up = np.maximum(self.up, by_host[:, rank]) + seconds / ranks
        first = float(at.min())
        sent = float(self.up.max())
        self.down = np.maximum(self.down, first) + seconds
        arrived = np.maximum(self.down, sent)
        if self.switches > 1:
            through = self.switch_slower * link
            starts = np.minimum.reduceat(by_host[:, 0], np.arange(0, self.hosts, self.per_switch))
            self.switch_up = np.maximum(self.switch_up, starts) + through
            self.switch_down = np.maximum(self.switch_down, first) + through
            slowest = max(float(self.switch_up.max()), float(self.switch_down.max()))
            arrived = np.maximum(arrived, slowest)
        return arrived
