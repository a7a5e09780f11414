"""A row for each world, rate and way.

A machine is slower at some moments than at others, for seconds. So the ways at one rate are measured in rounds, each
way for a few steps in every round: what is compared was measured side by side. Where steps are slow, one round will do.
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
"""Steps that are not timed, in each round: DDP puts its buckets together anew, and warm-ups end."""
_COLD = 10
_TRIALS = 40
"""At most, of "auto", before it has chosen."""
_PER_ROUND, _SLOW_MS = 5, 1000.0
_LEAST, _PATIENCE_SECONDS = 5, 15.0
_TIMEOUT_SECONDS = 120.0
"""For an exchange, beyond what the slowest link needs for it."""


@dataclass(frozen=True)
class Row:
    rate: str
    world: int
    way: str
    ms: float
    """Median of a step, over steps and ranks."""
    ms_mean: float
    bytes_per_step: float
    """That a rank has sent, the mean over ranks."""
    steps: int
    timeline: Timeline | None = None

    def record(self) -> dict[str, object]:
        return {"kind": "link", **{name: value for name, value in asdict(self).items() if name != "timeline"}}


@dataclass
class Taken:
    """Of one way at one rate, so far."""

    left: int
    """Steps to be taken."""
    samples: list[float] = field(default_factory=list)
    """Milliseconds, of all ranks."""
    sent: int = 0
    """Bytes, of all ranks."""
    steps: int = 0
    timeline: Timeline | None = None

    def row(self, rate: str, world: int, way: str) -> Row:
        bytes_per_step = self.sent / self.steps / world
        return Row(
            rate, world, way, median(self.samples), fmean(self.samples), bytes_per_step, self.steps, self.timeline
        )


def measure_all(settings: Settings, progress: Progress, *, timelines: bool = False) -> Iterator[Row]:
    """Worlds one after the other, in each all rates, at each all ways; with a timeline of one more step if wanted."""
    for world in settings.worlds:
        first = next(iter(settings.rates.values()))
        with network(world, first, relay=settings.relay) as net, Workers(world) as workers:
            workers.make(world, LinkRank, net.links, timeout(settings))
            workers.ask("join", workers.ask("host")[0])
            workers.ask("start", PEERS[0], settings.model, limit=timeout(settings))
            # Else the first way would pay for fresh memory and idle cores.
            workers.ask("steps", _COLD, limit=_COLD * timeout(settings))
            for name, rate in settings.rates.items():
                net.shape(rate)
                yield from _measure_ways(name, world, settings, net, workers, progress, timelines)


def timeout(settings: Settings) -> float:
    """Seconds for an exchange: a dense gradient over the slowest link takes two times its size at most."""
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
    """One round of a way; the only one if its steps are slow, or many before it has made its choice."""
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
