"""A row for each training: loss, bytes and time."""

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
"""Evenly over the steps, for a record; the last one counts."""


class Ranks(Protocol):
    """`Workers` or `Threads`."""

    def form(self, size: int, actor: Any, *args: object) -> None: ...

    def ask(self, method: str, *args: object) -> list[Any]: ...


@dataclass(frozen=True)
class Row:
    """One training. Bytes are those that a rank sent, the mean over ranks."""

    case: Case
    scores: dict[int, Score]
    """By step; the last one counts."""
    bytes_total: float
    bytes_per_step: float
    """After the warm-up."""
    dense_total: float
    """What dense ring all-reduces would have sent."""
    dense_per_step: float
    seconds: float
    """Of training, all ranks on this machine."""
    checksums: tuple[int, ...]
    """Of the weights, by rank."""

    @property
    def loss(self) -> float:
        return self.scores[max(self.scores)].loss

    @property
    def accuracy(self) -> float:
        return self.scores[max(self.scores)].accuracy

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense, warm-up included."""
        return self.dense_total / self.bytes_total if self.bytes_total else math.inf

    @property
    def ratio_per_step(self) -> float:
        return self.dense_per_step / self.bytes_per_step if self.bytes_per_step else math.inf

    @property
    def fault(self) -> str | None:
        if len(set(self.checksums)) > 1:
            return f"{self.case.title}: ranks ended with different weights, expected the same bits on all"
        return None

    def record(self) -> dict[str, object]:
        """As a line of JSON, which has no word for infinite or not a number."""
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
