"""Groups the rows of `thinwire bench recipe` into comparisons: same model, precision, steps and samples per step.

A result is the mean over seeds of one method with one learning rate and world size. Several rows with the same seed
count as one. The loss of dense and fp16 does not depend on the world size, because all ranks together see the same
samples. Their rows may have any world size and are used for all world sizes of the comparison.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import multimode
from typing import Any

from thinwire.tools.record import read as lines

_CONDITIONS = (
    "model", "config", "parameters", "workers", "batch", "steps", "warmup_steps", "lr", "device", "torch", "date",
    "simulate",
)  # fmt: skip
_ROW = ("recipe", "family", "seed", "loss", "accuracy", "bytes_total", "dense_total")
_ANY_RANKS = (" dense", " fp16 hook")


@dataclass(frozen=True)
class Metric:
    """The quantity by which trainings are compared."""

    key: str
    name: str
    show: Callable[[float], str]
    tick: Callable[[float], str]
    difference: Callable[[float, float], str]
    """Returns the difference between a value and that of dense, as text."""
    best: Callable[..., Any]
    """min or max."""


LOSS = Metric(
    key="loss",
    name="validation loss",
    show="{:.3f}".format,
    tick="{:g}".format,
    difference=lambda value, dense: f"{100 * (value / dense - 1):+.1f} %",
    best=min,
)
ACCURACY = Metric(
    key="accuracy",
    name="validation accuracy",
    show=lambda value: f"{100 * value:.1f} %",
    tick=lambda value: f"{100 * value:g} %",
    difference=lambda value, dense: f"{100 * (value - dense):+.1f}",
    best=max,
)


@dataclass(frozen=True)
class Method:
    """A recipe without its learning rate."""

    name: str
    options: str
    warmup_steps: int
    """Number of warm-up steps, 0 for dense and fp16."""

    @property
    def is_dense(self) -> bool:
        """Whether the method is uncompressed."""
        return self.name.endswith(" dense")

    @property
    def is_ours(self) -> bool:
        """Whether the method is one of thinwire's."""
        return " thinwire" in self.name


@dataclass(frozen=True)
class Result:
    """The mean over seeds."""

    value: float
    """Mean of the metric. NaN if a training diverged."""
    seeds: int
    bytes_total: float
    """Bytes that a rank sends in all steps."""
    dense_total: float

    @property
    def reduction(self) -> float:
        """Bytes of dense divided by the bytes sent."""
        return self.dense_total / self.bytes_total if self.bytes_total else math.inf


@dataclass(frozen=True)
class _Row:
    method: Method
    ranks: int
    lr: float
    seed: int
    value: float
    bytes_total: float
    dense_total: float


@dataclass
class Comparison:
    """Trainings with one family of optimizers that differ only in method, learning rate and world size."""

    conditions: dict[str, Any]
    family: str
    samples: int
    """Samples of all ranks in a step."""
    files: list[Path] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    """Device, torch version and date of the runs."""
    rows: list[_Row] = field(default_factory=list)
    results: dict[tuple[Method, int, float], Result] = field(default_factory=dict)
    """Results by method, world size and learning rate."""

    @property
    def metric(self) -> Metric:
        """The loss for a gpt, the accuracy for all other models."""
        return LOSS if self.conditions["model"] == "gpt" else ACCURACY

    @property
    def model(self) -> str:
        """Name and configuration of the model, as text."""
        config = ", ".join(f"{key}={value}" for key, value in self.conditions["config"].items())
        text = f"{self.conditions['model']} ({config})" if config else str(self.conditions["model"])
        return f"{text} in bfloat16" if self.conditions.get("bf16") else text

    @property
    def methods(self) -> list[Method]:
        """All methods: dense first, thinwire's last."""
        return sorted({key[0]: None for key in self.results}, key=lambda method: (not method.is_dense, method.is_ours))

    @property
    def columns(self) -> list[tuple[int, float]]:
        """World sizes and learning rates that have rows."""
        return sorted({(row.ranks, row.lr) for row in self.rows})

    @property
    def worlds(self) -> list[int]:
        """World sizes that have rows."""
        return sorted({ranks for ranks, _ in self.columns})

    def title(self, method: Method) -> str:
        """Return the name and options of a method, and its warm-up steps if they differ from the usual number."""
        usual = multimode(row.method.warmup_steps for row in self.rows if row.method.warmup_steps)[:1]
        warmup = f"warm-up {method.warmup_steps}" if method.warmup_steps not in (0, *usual) else ""
        return "; ".join(part for part in (method.name, method.options, warmup) if part)

    def dense(self, lr: float | None = None) -> tuple[Method, float, Result] | None:
        """Return the best dense method, its learning rate and its result. With `lr`, only that learning rate counts."""
        found = [
            (method, rate, result)
            for (method, _, rate), result in self.results.items()
            if method.is_dense and (lr is None or rate == lr) and math.isfinite(result.value)
        ]
        return self.metric.best(found, key=lambda one: one[2].value) if found else None

    def best(self, method: Method, ranks: int) -> tuple[float, Result] | None:
        """Return the best learning rate of a method at a world size, and its result."""
        found = [
            (lr, result)
            for (one, size, lr), result in self.results.items()
            if (one, size) == (method, ranks) and math.isfinite(result.value)
        ]
        return self.metric.best(found, key=lambda one: one[1].value) if found else None


def read(files: Iterable[Path]) -> list[Comparison]:
    """Return the comparisons, in the order of the files.

    Raises ValueError with the file if a row is not one of bench recipe, and if there is no dense training to compare
    with.
    """
    comparisons: dict[tuple[object, ...], Comparison] = {}
    for file in files:
        before = sum(len(one.rows) for one in comparisons.values())
        for line in lines(file):
            given = line["conditions"]
            _check(file, line, given)
            samples = given["workers"] * given["batch"]
            model = json.dumps([given["model"], given["config"], given["parameters"]], sort_keys=True)
            key = model, given.get("data"), given.get("bf16", False), given["steps"], samples, line["family"]
            one = comparisons.setdefault(key, Comparison(given, line["family"], samples))
            one.rows.append(_row(file, line, one.metric))
            kind = "threads of one process" if given["simulate"] else "processes"
            origin = f"{given['device']}, ranks are {kind}, torch {given['torch']}, {given['date'][:10]}"
            one.files += [] if file in one.files else [file]
            one.origins += [] if origin in one.origins else [origin]
        if before == sum(len(one.rows) for one in comparisons.values()):
            raise ValueError(f"{file}: no rows, expected what thinwire bench recipe --out wrote")
    for one in comparisons.values():
        _summarize(one)
    return list(comparisons.values())


def _check(file: Path, line: dict[str, Any], given: dict[str, Any]) -> None:
    expected = "expected what thinwire bench recipe --out wrote"
    if line["kind"] != "recipe":
        raise ValueError(f"{file}: a line of kind {line['kind']!r}, {expected}")
    for what, held, names in (("conditions", given, _CONDITIONS), ("a row", line, _ROW)):
        missing = [name for name in names if name not in held]
        if missing:
            raise ValueError(f"{file}: {what} without {missing[0]}, {expected}")


def _row(file: Path, line: dict[str, Any], metric: Metric) -> _Row:
    given, family = line["conditions"], line["family"]
    name, *options = (part.strip() for part in line["recipe"].split(";"))
    rates = [part.partition("=")[2] for part in options if part.partition("=")[0].strip() == "lr"]
    try:
        lr = float(rates[-1]) if rates else given["lr"][family]
    except ValueError:
        raise ValueError(f"{file}: learning rate {rates[-1]!r} of {line['recipe']!r}, expected a number") from None
    others = "; ".join(part for part in options if part.partition("=")[0].strip() != "lr")
    warmup = 0 if name.endswith(_ANY_RANKS) else given["warmup_steps"]
    value = math.nan if line[metric.key] is None or line["loss"] is None else float(line[metric.key])
    return _Row(
        method=Method(name, others, warmup),
        ranks=given["workers"],
        lr=float(f"{lr:.6g}"),  # 5 x 0.02 is not the float of 0.1
        seed=line["seed"],
        value=value,
        bytes_total=float(line["bytes_total"]),
        dense_total=float(line["dense_total"]),
    )


def _summarize(one: Comparison) -> None:
    dense_totals = {row.ranks: row.dense_total for row in one.rows}
    groups: dict[tuple[Method, int, float], list[_Row]] = {}
    for row in one.rows:
        for ranks in dense_totals if row.method.name.endswith(_ANY_RANKS) else (row.ranks,):
            groups.setdefault((row.method, ranks, row.lr), []).append(row)
    for (method, ranks, lr), rows in groups.items():
        by_seed: dict[int, list[float]] = {}
        for row in rows:
            by_seed.setdefault(row.seed, []).append(row.value)
        share = _mean([row.bytes_total / row.dense_total for row in rows])
        value = _mean([_mean(values) for values in by_seed.values()])
        one.results[method, ranks, lr] = Result(value, len(by_seed), share * dense_totals[ranks], dense_totals[ranks])
    if one.dense() is None:
        others = ", ".join(one.title(method) for method in one.methods)
        raise ValueError(
            f"{one.files[0]}: no training by '{one.family} dense' that ended in a number, for {one.model}, "
            f"{one.conditions['steps']} steps of {one.samples} samples, to compare with: {others}; add its file, or "
            f"run thinwire bench recipe --recipes '{one.family} dense' with the same model, steps and samples"
        )


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
