"""Measures loss, bytes and time of each training and yields one row for each."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from thinwire.tools.bench.progress import Progress

from .settings import Case, Settings
from .trainer import Score, Trainer

_STEPS_AT_ONCE = 10
_EVALUATIONS = 5
"""Number of evaluations, evenly spread over the steps. The last one is the result, the others are only recorded."""


class Ranks(Protocol):
    """The interface that `Workers` and `Threads` share."""

    def form(self, size: int, actor: Any, *args: object) -> None:
        """Form a world of `size` ranks and build `actor(rank, size, *args)` on each."""

    def ask(self, method: str, *args: object) -> list[Any]:
        """Call a method of the object on each rank and return the results, ordered by rank."""


@dataclass(frozen=True)
class Row:
    """Results of one training. Bytes are those sent by a rank, as the mean over ranks."""

    case: Case
    scores: dict[int, Score]
    """Score by step. The last one is the result."""
    bytes_total: float
    bytes_per_step: float
    """Mean bytes of a step after the warm-up."""
    dense_total: float
    """Bytes that dense ring all-reduces would send in all steps."""
    dense_per_step: float
    seconds: float
    """Training time, with all ranks on this machine."""
    checksums: tuple[int, ...]
    """Checksum of the weights of each rank."""

    @property
    def loss(self) -> float:
        """Validation loss at the end."""
        return self.scores[max(self.scores)].loss

    @property
    def accuracy(self) -> float:
        """Validation accuracy at the end."""
        return self.scores[max(self.scores)].accuracy

    @property
    def ratio(self) -> float:
        """Reduction: bytes of dense divided by the bytes sent, warm-up included."""
        return self.dense_total / self.bytes_total if self.bytes_total else math.inf

    @property
    def ratio_per_step(self) -> float:
        """Reduction after the warm-up."""
        return self.dense_per_step / self.bytes_per_step if self.bytes_per_step else math.inf

    @property
    def fault(self) -> str | None:
        """Description of the error if ranks ended with different weights, otherwise None."""
        if len(set(self.checksums)) > 1:
            return f"{self.case.title}: ranks ended with different weights, expected the same bits on all"
        return None

    def record(self) -> dict[str, object]:
        """Return the row as a dict for one line of JSON, with None in place of infinity and NaN."""
        return {
            "kind": "recipe",
            "recipe": self.case.recipe.text,
            "family": self.case.recipe.recipe.family,
            "seed": self.case.seed,
            "loss": _finite(self.loss),
            "accuracy": self.accuracy,
            "losses": [[step, _finite(score.loss)] for step, score in self.scores.items()],
            "bytes_total": self.bytes_total,
            "bytes_per_step": self.bytes_per_step,
            "dense_total": self.dense_total,
            "dense_per_step": self.dense_per_step,
            "ratio": _finite(self.ratio),
            "ratio_per_step": _finite(self.ratio_per_step),
            "seconds": self.seconds,
            "same_weights": len(set(self.checksums)) == 1,
        }


def measure_all(settings: Settings, ranks: Ranks, progress: Progress) -> Iterator[Row]:
    """Train every case and yield its row."""
    ranks.form(settings.workers, Trainer, settings)
    for case in settings.cases:
        row = _measure(case, settings, ranks, progress)
        progress.start(case.title)
        progress.finish(f"loss {row.loss:.4f}, {row.bytes_total / 1e6:,.3f} MB sent per rank, {row.seconds:.0f} s")
        yield row


def _measure(case: Case, settings: Settings, ranks: Ranks, progress: Progress) -> Row:
    steps, warmup = settings.steps, settings.warmup_steps
    evaluated = {steps * part // _EVALUATIONS for part in range(1, _EVALUATIONS + 1)} - {0}
    stops = sorted({0, *range(0, steps, _STEPS_AT_ONCE), warmup, *evaluated})
    sent, scores, seconds = {0: 0.0}, {}, 0.0
    progress.start(case.title)
    ranks.ask("start", case)
    for _, stop in pairwise(stops):
        started = time.perf_counter()
        answers: list[float] = ranks.ask("advance", stop)
        seconds += time.perf_counter() - started
        sent[stop] = sum(answers) / len(answers)
        progress.start(f"{case.title}, step {stop} of {steps}")
        if stop in evaluated:
            scores[stop] = ranks.ask("evaluate")[0]
    return Row(
        case,
        scores,
        sent[steps],
        (sent[steps] - sent[warmup]) / (steps - warmup),
        settings.dense_bytes(steps),
        settings.dense_bytes(1),
        seconds,
        tuple(ranks.ask("checksum")),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
