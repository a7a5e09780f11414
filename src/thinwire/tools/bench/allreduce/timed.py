"""Times the whole operation and its parts. Each is measured alone, in turns, on all ranks at once.

A time runs from the moment the first rank leaves a barrier until the last rank is done. It is taken from the clock that
all processes of a machine share, and the time of the barrier alone is subtracted. The parts are the calls that a
program could make by itself: compress with a residual, torch's all-gather of the payloads, and the sum of all payloads.
Ranks have one thread each. If there are more ranks than cores, all times include waiting for a core.
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
"""Highest acceptable ratio of the whole operation to the sum of its parts. It is reported but not enforced."""


@dataclass(frozen=True)
class TimeRow:
    """The time of the operation, of one of its parts, or of the barrier."""

    name: str
    time: Timing
    """Time minus that of the barrier. The row of the barrier has its full time."""
    numel: int
    ranks: int

    def record(self) -> dict[str, object]:
        """Return the row as a dict for one line of JSON."""
        return {
            "kind": "allreduce time",
            "name": self.name,
            "numel": self.numel,
            "ranks": self.ranks,
            "ms": asdict(self.time),
        }


@dataclass(frozen=True)
class Ratio:
    """Median time of the whole operation and sum of the median times of its parts."""

    whole: float
    parts: float

    @property
    def value(self) -> float | None:
        """`whole` divided by `parts`. None if the parts take no longer than the barrier."""
        return self.whole / self.parts if self.parts > 0 else None

    @property
    def ok(self) -> bool:
        """Whether the ratio is within `RATIO_LIMIT`."""
        return self.value is not None and self.value <= RATIO_LIMIT

    def record(self) -> dict[str, object]:
        """Return the ratio as a dict for one line of JSON."""
        return {
            "kind": "allreduce ratio",
            "whole_ms": self.whole,
            "parts_ms": self.parts,
            "ratio": self.value,
            "limit": RATIO_LIMIT,
            "ok": self.ok,
        }


def time_all(settings: Settings, workers: Workers, progress: Progress) -> Iterator[TimeRow]:
    """Time all jobs in turns and yield a row for each. Yield nothing if times are not requested."""
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
    """Return the milliseconds of each job from the first rank's start to the last rank's end.

    >>> _milliseconds([{"job": (1.0, 1.25)}, {"job": (1.125, 1.5)}])
    {'job': 500.0}
    """
    return {
        name: 1e3 * (max(rank[name][1] for rank in spans) - min(rank[name][0] for rank in spans)) for name in spans[0]
    }


def ratio_of(rows: list[TimeRow]) -> Ratio:
    """Return the ratio of the whole operation to its parts, from the medians of the rows."""
    medians = {row.name: row.time.p50 for row in rows}
    return Ratio(medians[WHOLE], sum(medians[part] for part in PARTS))
