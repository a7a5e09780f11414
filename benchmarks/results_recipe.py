"""Tables of what `python -m benchmarks recipe` measured: loss or accuracy by method, and bytes; and loss over time.

Rows are grouped into comparisons of the same model, precision, steps and samples per step.

A result is the mean over seeds of one method with one learning rate and world size. Several rows with the same seed
count as one. The loss of dense and fp16 does not depend on the world size, because all ranks together see the same
samples (but for batch norms, which see the samples of one rank). So where a world size has no rows of theirs, those of
the others are used.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, multimode
from typing import Any, NamedTuple

from .harness import Line, short
from .methods import LOCAL

CONDITIONS = (
    "model", "config", "parameters", "workers", "batch", "steps", "warmup_steps", "lr", "device", "torch", "date",
    "simulate",
)  # fmt: skip
ROW = ("method", "family", "warmup_steps", "seed", "loss", "accuracy", "bytes_total", "dense_total")
_ANY_RANKS = ("dense", "fp16 hook")
"""Methods that train alike with any number of ranks, so that one measurement stands for all."""
_BATCH_NORMS = ("resnet18",)
"""Models for which that does not hold: a batch norm sees the samples of one rank."""


class Method(NamedTuple):
    """A method without its learning rate."""

    name: str
    options: str
    warmup_steps: int
    """Number of warm-up steps, 0 for methods without."""

    @property
    def is_dense(self) -> bool:
        return self.name.split()[-1] == "dense"

    @property
    def is_ours(self) -> bool:
        return "thinwire" in self.name or LOCAL in self.name


class Row(NamedTuple):
    """A training."""

    method: Method
    ranks: int
    lr: float
    seed: int
    value: float
    """Loss or accuracy. NaN if the training diverged."""
    share: float
    """Bytes that a rank sends in all steps, over those of dense."""
    dense_total: float
    curve: tuple[tuple[float, float], ...]
    """Seconds and loss of each evaluation; empty if ranks had no links of a rate."""


class Result(NamedTuple):
    """The mean over seeds of a method with one learning rate and world size."""

    method: Method
    ranks: int
    lr: float
    value: float
    seeds: int
    share: float
    dense_total: float


@dataclass
class Comparison:
    """Trainings with one family of optimizers that differ only in method, learning rate and world size."""

    conditions: dict[str, Any]
    family: str
    samples: int
    """Samples of all ranks in a step."""
    files: dict[Path, None] = field(default_factory=dict)
    """Files in order, each once."""
    origins: dict[str, None] = field(default_factory=dict)
    """Device, torch version and date of the runs, each once."""
    rows: list[Row] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def metric(self) -> str:
        """Return what trainings are compared by: the loss of a gpt, the accuracy of all other models."""
        return "loss" if self.conditions["model"] == "gpt" else "accuracy"

    def show(self, value: float) -> str:
        return f"{value:.3f}" if self.metric == "loss" else f"{100 * value:.1f} %"

    def difference(self, value: float, dense: Result | None) -> str:
        """Format a difference to dense: a loss in percent, an accuracy in percentage points."""
        if dense is None:
            return "-"
        if self.metric == "loss":
            return f"{100 * (value / dense.value - 1):+.1f} %"
        return f"{100 * (value - dense.value):+.1f}"

    @property
    def model(self) -> str:
        config = ", ".join(f"{key}={value}" for key, value in self.conditions["config"].items())
        text = f"{self.conditions['model']} ({config})" if config else str(self.conditions["model"])
        return f"{text} in bfloat16" if self.conditions.get("bf16") else text

    @property
    def size(self) -> str:
        return f"{self.conditions['parameters'] / 1e6:.3g} M parameters"

    @property
    def methods(self) -> list[Method]:
        """Return all methods: dense first, thinwire's last."""
        return sorted({result.method: 0 for result in self.results}, key=lambda one: (not one.is_dense, one.is_ours))

    @property
    def worlds(self) -> list[int]:
        return sorted({row.ranks for row in self.rows})

    def title(self, method: Method) -> str:
        """Return the name and options of a method, and its warm-up steps if they differ from the usual number."""
        usual = multimode(row.method.warmup_steps for row in self.rows if row.method.warmup_steps)[:1]
        is_given = method.warmup_steps in (0, *usual) or "warmup_steps=" in method.options
        warmup = "" if is_given else f"warm-up {method.warmup_steps}"
        return "; ".join(part for part in (method.name, method.options, warmup) if part)

    def best(self, **wanted: object) -> Result | None:
        """Return the best dense result that ended in a number, with these values of fields."""
        found = [
            result
            for result in self.results
            if result.method.is_dense and math.isfinite(result.value) and wanted.items() <= result._asdict().items()
        ]
        return (min if self.metric == "loss" else max)(found, key=lambda result: result.value, default=None)


def group(rows: Mapping[Path, Iterable[Line]]) -> list[Comparison]:
    """Return the comparisons, in the order of the files."""
    comparisons: dict[tuple[object, ...], Comparison] = {}
    for file, lines in rows.items():
        for line in lines:
            given = line["conditions"]
            samples = given["workers"] * given["batch"]
            model = json.dumps([given["model"], given["config"], given["parameters"]], sort_keys=True)
            key = model, given.get("data"), given.get("bf16", False), given["steps"], samples, line["family"]
            one = comparisons.setdefault(key, Comparison(given, line["family"], samples))
            one.rows.append(_row(file, line, one.metric))
            kind = "threads of one process" if given["simulate"] else "processes"
            one.files[file] = None
            one.origins[f"{given['device']}, ranks are {kind}, torch {given['torch']}, {given['date'][:10]}"] = None
    for one in comparisons.values():
        _summarize(one)
    return list(comparisons.values())


def _row(file: Path, line: dict[str, Any], metric: str) -> Row:
    given, family = line["conditions"], line["family"]
    name, *options = (part.strip() for part in line["method"].split(";"))
    rates = [part.partition("=")[2] for part in options if part.partition("=")[0].strip() == "lr"]
    try:
        lr = float(rates[-1]) if rates else given["lr"][family]
    except ValueError:
        raise ValueError(f"{file}: learning rate {rates[-1]!r} of {line['method']!r}, expected a number") from None
    others = "; ".join(part for part in options if part.partition("=")[0].strip() != "lr")
    value = math.nan if None in (line["loss"], line[metric]) else float(line[metric])
    losses = [loss or math.nan for _, loss in line["losses"]] if given.get("link") else []
    return Row(
        method=Method(name, others, line["warmup_steps"]),
        ranks=given["workers"],
        lr=float(f"{lr:.6g}"),  # 5 x 0.02 is not the float of 0.1
        seed=line["seed"],
        value=value,
        share=line["bytes_total"] / line["dense_total"],
        dense_total=float(line["dense_total"]),
        curve=tuple(zip(line["times"], losses, strict=True)) if losses else (),
    )


def _summarize(one: Comparison) -> None:
    dense_totals = {row.ranks: row.dense_total for row in one.rows}
    alike = () if one.conditions["model"] in _BATCH_NORMS else _ANY_RANKS
    measured = {(row.method, row.ranks, row.lr) for row in one.rows}
    groups: dict[tuple[Method, int, float], list[Row]] = {}
    for row in one.rows:
        for ranks in {row.ranks, *(dense_totals if row.method.name.endswith(alike) else ())}:
            key = row.method, ranks, row.lr
            if ranks == row.ranks or key not in measured:
                groups.setdefault(key, []).append(row)
    for (method, ranks, lr), rows in groups.items():
        by_seed: dict[int, list[float]] = {}
        for row in rows:
            by_seed.setdefault(row.seed, []).append(row.value)
        value = fmean([fmean(values) for values in by_seed.values()])
        share = fmean(row.share for row in rows)
        one.results.append(Result(method, ranks, lr, value, len(by_seed), share, dense_totals[ranks]))


def check(comparisons: Iterable[Comparison]) -> None:
    """Raise ValueError with the file if there is no dense training to compare with."""
    for one in comparisons:
        if one.best() is None:
            others = ", ".join(one.title(method) for method in one.methods)
            raise ValueError(
                f"{next(iter(one.files))}: no training by '{one.family} dense' that ended in a number, for {one.model},"
                f" {one.conditions['steps']} steps of {one.samples} samples, to compare with: {others}; add its file, "
                f"or run python -m benchmarks recipe --methods '{one.family} dense' with the same model, steps and "
                "samples"
            )


def section(comparisons: Sequence[Comparison], link: Callable[[Path], str]) -> list[str]:
    """Return the tables and their captions as paragraphs of Markdown. `link` returns the link to a file."""
    parts: list[str] = []
    for one in comparisons:
        rows = ", ".join(f"[{link(file)}]({link(file)})" for file in one.files)
        parts += [title(one), table(one), f"{'; '.join(one.origins)}. Rows: {rows}."]
    return parts


def table(one: Comparison) -> str:
    rates = sorted({row.lr for row in one.rows})
    heads = ["", "ranks", *(f"lr {lr:g}" for lr in rates), "seeds", "reduction"]
    lines = [heads, ["---"] * len(heads)]
    for method in one.methods:
        title = f"**{one.title(method)}**" if method.is_ours else one.title(method)
        for ranks in one.worlds:
            found = {result.lr: result for result in one.results if (result.method, result.ranks) == (method, ranks)}
            if not found:
                continue
            cells = [_cell(one, found[lr]) if lr in found else "" for lr in rates]
            counts = sorted({result.seeds for result in found.values()})
            seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
            # The bytes of few methods depend on the learning rate.
            reduction = (
                f"{short(fmean(1 / result.share if result.share else math.inf for result in found.values()), 2)}x"
            )
            lines.append([title, str(ranks), *cells, seeds, reduction])
        alike = [line for line in lines if line[0] == title]
        if len(alike) > 1 and all(line[2:] == alike[0][2:] for line in alike):
            lines = [*lines[: -len(alike)], [title, "any", *alike[0][2:]]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(one: Comparison, result: Result) -> str:
    if not math.isfinite(result.value):
        return "diverged"
    text = one.show(result.value)
    if result.method.is_dense or one.best() is None:
        return text
    same, best = one.best(ranks=result.ranks, lr=result.lr), one.best(ranks=result.ranks)
    return f"{text} ({one.difference(result.value, same)} / {one.difference(result.value, best)})"


def title(one: Comparison) -> str:
    """Return the caption of a table."""
    given, best, compared = one.conditions, one.best(), ""
    if best is not None:
        unit = "" if one.metric == "loss" else ", in percentage points,"
        dense = "; ".join(part for part in (best.method.options, f"lr {best.lr:g}") if part)
        compared = (
            f" In brackets the difference{unit} to the best dense with the same learning rate / to the best dense of "
            f"all ({one.show(best.value)}: {dense}); `-`: there is none."
        )
    data = f" on {given['data']}" if "data" in given else ""
    totals = {result.ranks: result.dense_total for result in one.results}
    sent = ", ".join(f"{totals[ranks] / 1e6:,.0f} MB with {ranks} ranks" for ranks in one.worlds)
    return (
        f"{one.model}{data}, {one.size}, {one.family}, {given['steps']:,} steps of {one.samples} samples: validation "
        f"{one.metric}, the mean over seeds.{compared} Reduction: bytes that a rank sends in all steps, warm-up "
        f"included, against a dense ring all-reduce ({sent})."
    )


def draw(comparisons: Sequence[Comparison], plt: Any) -> Any:
    """Return a figure of matplotlib: loss over time of trainings behind links."""
    size = (8, 4.8 * len(comparisons))
    figure, panels = plt.subplots(len(comparisons), 1, squeeze=False, figsize=size, layout="constrained")
    for one, axes in zip(comparisons, panels[:, 0], strict=True):
        given = one.conditions
        how = f"{one.worlds[0]} ranks behind links of {given['link']}"
        axes.set_title(f"{given['model']}, {one.size}, {how}, {given['steps']:,} steps", fontsize=10)
        _draw_curves(one, axes)
    return figure


def _draw_curves(one: Comparison, axes: Any) -> None:
    """Draw the mean over seeds, with a line for each method and its name at its end."""
    ends: list[tuple[float, float, str]] = []
    for number, method in enumerate(sorted(one.methods, key=lambda method: not method.is_ours)):
        evaluations = zip(*(row.curve for row in one.rows if row.method == method), strict=True)
        points = [[fmean(values) for values in zip(*seeds, strict=True)] for seeds in evaluations]
        seconds, losses = zip(*points, strict=True)
        axes.plot(seconds, losses, color=f"C{number % 10}", linewidth=3 if method.is_ours else 1.5)
        label = f"{one.title(method)}: {losses[-1]:.2f} after {seconds[-1]:,.0f} s"
        ends.append((seconds[-1], losses[-1], label))
    for number, (x, y, label) in enumerate(sorted(ends)):  # below and above by turns, so that neighbours do not meet
        axes.annotate(label, (x, y), xytext=(4, 4 if number % 2 else -11), textcoords="offset points", fontsize=8)
    axes.set_xlim(0, 1.3 * max(ends)[0])
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("validation loss")
