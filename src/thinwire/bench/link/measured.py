"""A row for each world, rate and way."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import fmean, median

from thinwire.bench.progress import Progress
from thinwire.workers import Workers

from .network import Network, network
from .rank import LinkRank
from .settings import PEERS, Settings
from .timeline import Timeline

_BEFORE = 3
"""Steps that are not timed: DDP puts its buckets together anew, and warm-ups end."""
_COLD = 10
_TRIALS = 40
"""At most, of "auto", before it has chosen."""
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


def measure_all(settings: Settings, progress: Progress, *, timelines: bool = False) -> Iterator[Row]:
    """Worlds one after the other, in each all rates, at each all ways; with a timeline of one more step if wanted."""
    for world in settings.worlds:
        first = next(iter(settings.rates.values()))
        with network(world, first, relay=settings.relay) as net, Workers(world) as workers:
            workers.make(world, LinkRank, net.links, timeout(settings))
            workers.ask("join", workers.ask("host")[0])
            workers.ask("start", PEERS[0], settings.model)
            workers.ask("steps", _COLD)  # else the first way would pay for fresh memory and idle cores
            for name, rate in settings.rates.items():
                net.shape(rate)
                for way in settings.ways:
                    progress.start(f"{world} ranks, {name}, {way}")
                    row = _measure(name, world, way, settings, net, workers, timelines)
                    progress.finish(f"{row.ms:,.1f} ms, {row.bytes_per_step / 1e6:,.3f} MB")
                    yield row


def timeout(settings: Settings) -> float:
    """Seconds for an exchange: a dense gradient over the slowest link takes two times its size at most."""
    return _TIMEOUT_SECONDS + 4 * 2 * 32 * settings.model.parameters / min(settings.rates.values())


def _measure(
    rate: str, world: int, way: str, settings: Settings, net: Network, workers: Workers, timelines: bool
) -> Row:
    limit = timeout(settings)  # of one step
    workers.ask("start", way, settings.model, limit=limit)
    last: float = workers.ask("warm_up", _BEFORE, limit=_TRIALS * limit)[0]
    steps = min(settings.steps, max(_LEAST, int(1e3 * _PATIENCE_SECONDS / last)))
    sent = sum(net.sent_bytes())
    taken: list[list[float]] = workers.ask("steps", steps, limit=steps * limit)
    sent = sum(net.sent_bytes()) - sent
    samples = [sample for one in taken for sample in one]
    timeline = workers.ask("timeline", limit=limit)[0] if timelines else None
    return Row(rate, world, way, median(samples), fmean(samples), sent / steps / world, steps, timeline)
