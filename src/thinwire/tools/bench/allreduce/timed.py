"""Time: the whole operation beside its parts, each measured alone, in turns, with all ranks at work at once.

A time is from when the first rank leaves a barrier until the last rank is done, by the clock that all processes of a
machine share, less what the barrier alone makes of that. The parts are what a program would call by itself: compress
with its residual, an all-gather of the payloads by torch, and the sum of all payloads. Ranks have one thread each;
where they are more than the cores, all times contain the waiting for a core.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from thinwire.compressors import format_spec
from thinwire.tools.bench.measure import Timing, percentile
from thinwire.tools.bench.progress import Progress
from thinwire.tools.workers import Workers

from .settings import Settings
from .timer import BARRIER, PARTS, WHOLE, Span, Timer

RATIO_LIMIT = 1.10
"""What the whole should take at most, in times of its parts. Told, not enforced."""


@dataclass(frozen=True)
class TimeRow:
    name: str
    time: Timing
    """Less the barrier."""
    numel: int
    ranks: int

    def record(self) -> dict[str, object]:
        """As a line of JSON."""
        return {
            "kind": "allreduce time",
            "name": self.name,
            "numel": self.numel,
            "ranks": self.ranks,
            "ms": asdict(self.time),
        }


@dataclass(frozen=True)
class Ratio:
    """The whole operation against the sum of its parts, by medians."""

    whole: float
    parts: float

    @property
    def value(self) -> float | None:
        """None if the parts are too short to be told from the barrier."""
        return self.whole / self.parts if self.parts > 0 else None

    @property
    def ok(self) -> bool:
        return self.value is not None and self.value <= RATIO_LIMIT

    def record(self) -> dict[str, object]:
        """As a line of JSON."""
        return {
            "kind": "allreduce ratio",
            "whole_ms": self.whole,
            "parts_ms": self.parts,
            "ratio": self.value,
            "limit": RATIO_LIMIT,
            "ok": self.ok,
        }


def time_all(settings: Settings, workers: Workers, progress: Progress) -> Iterator[TimeRow]:
    if "time" not in settings.parts:
        return
    title = f"{settings.ranks} ranks, {settings.numel:,} x float32"
    progress.start(f"{title}, start")
    workers.form(settings.ranks, Timer, format_spec(settings.compressor), settings.numel)
    workers.ask("turn")
    progress.finish("ready")
    turns: list[dict[str, float]] = []
    for number in range(1, settings.repeats + 1):
        progress.start(f"{title}, turn {number}")
        turns.append(_milliseconds(workers.ask("turn")))
        progress.finish(f"{turns[-1][WHOLE]:.4g} ms")
    ready = percentile([turn[BARRIER] for turn in turns], 50)
    for name in turns[0]:
        taken = [turn[name] - (ready if name != BARRIER else 0.0) for turn in turns]
        timing = Timing(percentile(taken, 20), percentile(taken, 50), percentile(taken, 80), len(taken))
        yield TimeRow(name, timing, settings.numel, settings.ranks)


def _milliseconds(spans: list[dict[str, Span]]) -> dict[str, float]:
    """From the first rank's start to the last one's end.

    >>> _milliseconds([{"job": (1.0, 1.25)}, {"job": (1.125, 1.5)}])
    {'job': 500.0}
    """
    return {
        name: 1e3 * (max(rank[name][1] for rank in spans) - min(rank[name][0] for rank in spans)) for name in spans[0]
    }


def ratio_of(rows: list[TimeRow]) -> Ratio:
    medians = {row.name: row.time.p50 for row in rows}
    return Ratio(medians[WHOLE], sum(medians[part] for part in PARTS))
