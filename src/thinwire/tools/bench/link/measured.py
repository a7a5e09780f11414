"""Measures each way at each rate and world size and yields one row for each.

A machine is sometimes slower for a few seconds. The ways at one rate are therefore measured in rounds, with a few steps
of each way in every round, so that compared times were taken close together. If steps are slow, there is one round
only.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import fmean, median

from thinwire.sync.policy import AUTO
from thinwire.tools.bench.progress import Progress
from thinwire.tools.workers import WorkerError, Workers

from .network import Network, network
from .rank import LinkRank
from .settings import PEERS, Settings
from .timeline import Timeline

_BEFORE = 3
"""Steps at the start of each round that are not timed, in which DDP rebuilds its buckets and warm-ups end."""
_COLD = 10
_TRIALS = 40
"""Number of steps that the time limit of the warm-up allows, in which "auto" tries compressors and chooses."""
_PER_ROUND, _SLOW_MS = 5, 1000.0
_LEAST, _PATIENCE_SECONDS = 5, 15.0
_TIMEOUT_SECONDS = 120.0
"""Seconds for an exchange, in addition to the time that the slowest link needs."""


@dataclass(frozen=True)
class Row:
    """Results of one way at one rate and world size."""

    rate: str
    world: int
    way: str
    ms: float
    """Median time of a step, over steps and ranks."""
    ms_mean: float
    bytes_per_step: float
    """Bytes that a rank sends in a step, as the mean over ranks."""
    steps: int
    timeline: Timeline | None = None

    def record(self) -> dict[str, object]:
        """Return the row without its timeline as a dict for one line of JSON."""
        return {"kind": "link", **{name: value for name, value in asdict(self).items() if name != "timeline"}}


@dataclass
class Taken:
    """Samples of one way at one rate, collected so far."""

    left: int
    """Number of steps that are still to be timed."""
    samples: list[float] = field(default_factory=list)
    """Milliseconds of the steps of all ranks."""
    sent: int = 0
    """Bytes sent by all ranks."""
    steps: int = 0
    timeline: Timeline | None = None

    def row(self, rate: str, world: int, way: str) -> Row:
        """Return the row with the results of all samples."""
        bytes_per_step = self.sent / self.steps / world
        return Row(
            rate, world, way, median(self.samples), fmean(self.samples), bytes_per_step, self.steps, self.timeline
        )


def measure_all(settings: Settings, progress: Progress, *, timelines: bool = False) -> Iterator[Row]:
    """Yield the rows of each world size, in each of them all rates, and at each rate all ways.

    With `timelines`, each way takes one more step, whose timeline is recorded.
    """
    for world in settings.worlds:
        first = next(iter(settings.rates.values()))
        with network(world, first, relay=settings.relay) as net, Workers(world) as workers:
            workers.make(world, LinkRank, net.links, timeout(settings))
            workers.ask("join", workers.ask("host")[0])
            workers.ask("start", PEERS[0], settings.model, limit=timeout(settings))
            # Otherwise fresh memory and idle cores would slow the first way down.
            workers.ask("steps", _COLD, limit=_COLD * timeout(settings))
            for name, rate in settings.rates.items():
                net.shape(rate)
                yield from _measure_ways(name, world, settings, net, workers, progress, timelines)


def timeout(settings: Settings) -> float:
    """Return the time limit of an exchange in seconds.

    A dense all-reduce sends at most twice the gradient of 32 bits per parameter. The limit is four times that over the
    slowest link, plus `_TIMEOUT_SECONDS`.
    """
    return _TIMEOUT_SECONDS + 4 * 2 * 32 * settings.model.parameters / min(settings.rates.values())


def _measure_ways(
    rate: str, world: int, settings: Settings, net: Network, workers: Workers, progress: Progress, timelines: bool
) -> Iterator[Row]:
    taken = {way: Taken(settings.steps) for way in settings.ways}
    untold = list(settings.ways)  # rows come in the order of the ways
    while left := [way for way in settings.ways if taken[way].left]:
        for way in left:
            progress.start(f"{world} ranks, {rate}, {way}")
            try:
                _take_steps(way, taken[way], settings, net, workers, timelines)
            except WorkerError:
                yield from (taken[name].row(rate, world, name) for name in untold if taken[name].steps)
                raise
            if not taken[way].left:
                row = taken[way].row(rate, world, way)
                progress.finish(f"{row.ms:,.1f} ms, {row.bytes_per_step / 1e6:,.3f} MB")
            while untold and not taken[untold[0]].left:
                name = untold.pop(0)
                yield taken[name].row(rate, world, name)


def _take_steps(way: str, taken: Taken, settings: Settings, net: Network, workers: Workers, timelines: bool) -> None:
    """Run one round of a way. Slow steps and "auto", which takes many steps to choose, get one round only."""
    limit = timeout(settings)  # of one step
    workers.ask("start", way, settings.model, limit=limit)
    last: float = workers.ask("warm_up", _BEFORE, limit=_TRIALS * limit)[0]
    steps = min(_PER_ROUND, taken.left)
    if last > _SLOW_MS or way.endswith(f" {AUTO}"):
        steps = min(taken.left, max(_LEAST, int(1e3 * _PATIENCE_SECONDS / last)))
        taken.left = steps
    sent = sum(net.sent_bytes())
    times: list[list[float]] = workers.ask("steps", steps, limit=steps * limit)
    taken.sent += sum(net.sent_bytes()) - sent
    taken.samples += [sample for one in times for sample in one]
    taken.steps, taken.left = taken.steps + steps, taken.left - steps
    if timelines and not taken.left:
        taken.timeline = workers.ask("timeline", limit=limit)[0]
