"""Compare predictions with measurements: predict the rows of a file of `thinwire bench link --out`.

A prediction takes from the file only what a user would give: the rate, the number of ranks, the model's shapes, and the
time of a step without communication (the row "no communication" of the same world size). The costs of codecs and
optimizers are measured again, by ranks that do not communicate (`alone`), as many at a time as in the rows. So the rows
must come from this machine. PowerSGD is not part of thinwire and is not predicted.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.compressors import NoCompression, compressor, format_spec
from thinwire.sync.policy import AUTO, DEFAULT, default_compressor
from thinwire.tools.bench.link.models import batch, build
from thinwire.tools.bench.link.settings import Model, parse_rate
from thinwire.tools.bench.tables import print_table
from thinwire.tools.record import cores
from thinwire.tools.workers import WorkerError, Workers

from .alone import NOTHING, alone, measure_steps
from .check_rows import CONDITIONS, Row, read_rows
from .cluster import Cluster
from .combine import Measured, Together, combine
from .measure import Bench, measure_codecs
from .model import Case
from .ways import DENSE, HALVES, Way, auto
from .work import Work, of_sizes

_TORCH = {name: Way(name, "ring") for name in (DENSE, *HALVES)}
_MODES = ("attach", "thinwire.AdamW", "thinwire.SGD")
_LATENCY = 1e-4
"""Seconds of latency on the links of `thinwire bench link`. These limit only the rate, so this is the latency of a
message between two processes of one machine."""
GOAL, _BUSY = 0.2, 0.5


@dataclass(frozen=True)
class Checked:
    """Predicted and measured seconds and bytes of a step, for one row."""

    rate: str
    world: int
    way: str
    predicted: float
    measured: float
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """Return the relative error of the predicted time."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Outcome:
    """Result of a check."""

    rows: list[Checked]
    not_predicted: list[str]
    """Names of the ways in the file that were not predicted: peers such as PowerSGD, and the spec "auto"."""
    load: float
    """Highest load average per core at the time of the measurements; 0 if it was not recorded."""


def check(path: Path) -> Outcome:
    """Predict the rows of the file, except those of ways that cannot be predicted.

    Raise ValueError if no row can be predicted, or if the row "no communication" is missing.
    """
    rows = read_rows(path)
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["world"], *(row["conditions"][name] for name in CONDITIONS)), []).append(row)
    found: list[Checked] = []
    for (world, *_), some in sorted(runs.items(), key=lambda item: item[0][0]):
        found += _check_run(some, world, path)
    if not found:
        raise ValueError(f"--check {path} has no row that can be predicted, expected dense, or a way of thinwire's")
    known = {one.way for one in found} | {NOTHING}
    load = max((row["conditions"].get("load_average") or 0.0) / row["conditions"]["cores"] for row in rows)
    return Outcome(found, sorted({row["way"] for row in rows} - known), load)


def print_check(outcome: Outcome, path: Path) -> None:
    """Print a table of predictions and measurements, and a summary of the errors."""
    print_table(
        f"{path}: predicted and measured",
        ("ranks", "rate", "way", "predicted, ms", "measured, ms", "error", "MB predicted", "MB measured"),
        [
            [
                str(one.world), one.rate, one.way, f"{1e3 * one.predicted:,.1f}", f"{1e3 * one.measured:,.1f}",
                f"{one.error:+.1%}", f"{one.predicted_bytes / 1e6:,.3f}", f"{one.measured_bytes / 1e6:,.3f}",
            ]
            for one in outcome.rows
        ],
        text=("rate", "way"),
    )  # fmt: skip
    errors = [abs(one.error) for one in outcome.rows]
    within = sum(error < GOAL for error in errors)
    print(
        f"{within} of {len(errors)} rows within {GOAL:.0%}; error of the median row {median(errors):.1%}, "
        f"of the worst {max(errors):.1%}. Bytes were measured with headers."
    )
    if outcome.load > _BUSY:
        print(f"The machine was busy when this was measured: a load average of {outcome.load:.1f} for each core.")
    if outcome.not_predicted:
        print(f"Not predicted: {', '.join(outcome.not_predicted)}.")


def way_of(name: str, world: int, entries: int) -> Way | None:
    """Return the way with this name in `thinwire bench link`, or None if it cannot be predicted.

    world     world size, from which the compressor of the spec "default" follows.
    entries   number of elements of the largest bucket, from which the algorithm follows.
    """
    mode, _, spec = name.partition(" ")
    if name in _TORCH or mode not in _MODES or spec == AUTO:  # auto chooses by measuring
        return _TORCH.get(name)
    spec = format_spec(default_compressor(world)) if spec == DEFAULT else spec
    given = compressor(spec)
    if isinstance(given, NoCompression):
        return _TORCH[DENSE]
    return Way(spec, auto(given, world, entries), False, mode)


def _check_run(rows: Sequence[Row], world: int, path: Path) -> list[Checked]:
    alone_rows = {row["rate"]: row["ms"] / 1e3 for row in rows if row["way"] == NOTHING}
    if not alone_rows:
        raise ValueError(
            f'--check {path} has no row "{NOTHING}" with {world} ranks, from which the time of computing is known: run '
            f'thinwire bench link with it among the --ways, such as "{NOTHING}" dense'
        )
    under = rows[0]["conditions"]
    model = Model(under["model"], under["parameters"], under["batch"])
    sizes = _sizes(model)
    largest = max(bucket.entries for bucket in of_sizes(sizes))
    ways = {row["way"]: way_of(row["way"], world, largest) for row in rows}
    names = [name for name, way in ways.items() if way is not None]
    if not names:
        return []
    together = _measure(names, model, world, under)
    nothing = together.nothing
    found = []
    for row in rows:
        way = ways[row["way"]]
        if way is None:
            continue
        # Scaled to the speed of the machine at that time: the ways at one rate were measured in turns.
        seconds = alone_rows.get(row["rate"], min(alone_rows.values()))
        work = Work.of_numbers(sum(sizes), seconds, seconds * nothing.optimizer / sum(nothing), sizes)
        speeds = together.speeds.slower(seconds / sum(nothing))
        slows = max(0.0, min(1.0, 2 - under["cores"] / world))
        cluster = Cluster(world, parse_rate(row["rate"]), _LATENCY, codec_slows=slows, wire_slows=slows)
        one = Case(work, cluster, speeds).predict(way)
        found.append(
            Checked(
                row["rate"], world, row["way"], one.seconds, row["ms"] / 1e3, one.footprint.sent, row["bytes_per_step"]
            )
        )
    return found


class Probe:
    """A rank that measures itself without communication."""

    def __init__(self, rank: int, size: int, names: list[str], model: Model) -> None:
        warnings.filterwarnings("ignore", ".*AdamW on gradients compressed by")  # only the time matters here
        self._names, self._model, self._size = names, model, size
        self._bench = Bench(torch.device("cpu"), crowd=max(1.0, size * torch.get_num_threads() / cores()))

    def measure(self) -> Measured:
        """Measure the codecs and the steps of this rank."""
        ways = [way_of(name, self._size, 1 << 20) for name in self._names]
        made = {way.spec: compressor(way.spec) for way in ways if way is not None and way.compresses}
        codecs, halves = measure_codecs(made, self._bench)
        inputs = batch(self._model)

        def loss(module: nn.Module) -> Tensor:
            return F.mse_loss(module(inputs), torch.zeros(()).expand_as(inputs))

        with alone("gloo"):
            steps = measure_steps(lambda: (build(self._model), loss), self._names, self._bench)
        return Measured(codecs, halves, steps)


def _measure(names: list[str], model: Model, ranks: int, under: Row) -> Together:
    """Measure with `ranks` processes of this machine at the same time, and combine their results."""
    try:
        with Workers(ranks, under["worker_threads"]) as workers:
            workers.make(ranks, Probe, names, model)
            answers: list[Measured] = workers.ask("measure")
    except WorkerError as error:
        if error.trace:  # a bug in thinwire
            raise RuntimeError(error.trace) from error
        raise ValueError(f"{ranks} ranks could not be measured here: {error}") from None
    crowd = max(1.0, ranks * under["worker_threads"] / under["cores"])
    return combine(answers, sum(_sizes(model)), "measured here", crowd)


def _sizes(model: Model) -> list[int]:
    with torch.device("meta"):
        return [parameter.numel() for parameter in build(model).parameters()]
