"""A row for each rate, world and way."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import fmean, median

from thinwire.bench.progress import Progress
from thinwire.workers import Workers

from .lab import Lab
from .rank import LinkRank, Taken
from .settings import Settings

_BEFORE = 3
"""Steps that are not timed: DDP puts its buckets together anew, and warm-ups end."""
_LEAST, _PATIENCE_SECONDS = 5, 15.0


@dataclass(frozen=True)
class Row:
    rate: str
    world: int
    way: str
    ms: float
    """Median of a step, over steps and ranks."""
    ms_mean: float
    bytes_per_step: float
    """Sent by the interface of a rank."""
    steps: int

    def record(self) -> dict[str, object]:
        return {"kind": "link", **asdict(self)}


def measure_all(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Worlds one after the other, in each all rates, at each all ways."""
    for world in settings.worlds:
        rates = list(settings.rates.items())
        with Lab(world, rates[0][1]) as lab, Workers(world) as workers:
            workers.make(world, LinkRank, lab.links)
            workers.ask("join", workers.ask("host")[0])
            for name, rate in rates:
                lab.shape(rate)
                for way in settings.ways:
                    progress.start(f"{world} ranks, {name}, {way}")
                    row = _measure(name, world, way, settings, workers)
                    progress.finish(f"{row.ms:,.1f} ms, {row.bytes_per_step / 1e6:,.3f} MB")
                    yield row


def _measure(rate: str, world: int, way: str, settings: Settings, workers: Workers) -> Row:
    workers.ask("start", way, settings.model)
    before: list[Taken] = workers.ask("steps", _BEFORE)
    expected = before[0].milliseconds[-1] / 1e3
    steps = max(_LEAST, min(settings.steps, int(_PATIENCE_SECONDS / expected)))
    taken: list[Taken] = workers.ask("steps", steps)
    samples = [sample for one in taken for sample in one.milliseconds]
    return Row(rate, world, way, median(samples), fmean(samples), fmean(one.bytes_per_step for one in taken), steps)
