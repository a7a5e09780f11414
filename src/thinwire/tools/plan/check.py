"""Compare predictions with measurements: predict the rows of a file of `thinwire bench link --out`.

A prediction takes from the file only what a user would give: the rate, the number of ranks, the model's shapes, and the
time of a step without communication (the row "no communication" of the same world size). The costs of codecs and
optimizers are measured again, by ranks that do not communicate, as many at a time as in the rows. So the rows must come
from this machine. PowerSGD is not part of thinwire and is not predicted.

Rows are read strictly, because a prediction from invalid values would look like any other prediction.
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

from thinwire.tools.bench.harness import print_table
from thinwire.tools.bench.link.rank import build_model, make_batch
from thinwire.tools.bench.link.settings import Model
from thinwire.tools.bench.methods import NO_COMMUNICATION
from thinwire.tools.record import cores, cpu_model, read
from thinwire.tools.units import parse_link
from thinwire.tools.workers import WorkerError, Workers

from .costs import Speeds, Work
from .measure import Bench, RankCosts, Split, alone, combine, measure_codecs, measure_steps
from .methods import Method, method_of
from .model import Case, Cluster

Row = dict[str, Any]
_Kinds = dict[str, type | tuple[type, ...]]
_NUMBER = (int, float)
_FIELDS: _Kinds = {"rate": str, "world": int, "method": str, "ms": _NUMBER, "bytes_per_step": _NUMBER}
_CONDITIONS: _Kinds = {
    "model": str, "parameters": _NUMBER, "batch": int, "worker_threads": int, "cores": int, "cpu": str,
}  # fmt: skip
"""Types of the recorded conditions that the time of a step depends on, besides the row itself."""
_LATENCY = 1e-4
"""Seconds of latency of a message between two processes of one machine. On the links of `thinwire bench link`, half the
round-trip time is added to it."""
_GOAL, _BUSY = 0.2, 0.5


@dataclass(frozen=True)
class Checked:
    """Predicted and measured seconds and bytes of a step, for one row."""

    row: Row
    predicted: float
    predicted_bytes: float

    @property
    def error(self) -> float:
        """Return the relative error of the predicted time."""
        return 1e3 * self.predicted / float(self.row["ms"]) - 1


@dataclass(frozen=True)
class Outcome:
    """Result of a check."""

    rows: list[Checked]
    not_predicted: list[str]
    """Names of the methods in the file that were not predicted: peers such as PowerSGD, and the spec "auto"."""
    load: float
    """Highest load average per core at the time of the measurements; 0 if it was not recorded."""


def check(path: Path) -> Outcome:
    """Predict the rows of the file, except those of methods that cannot be predicted.

    Raise ValueError if no row can be predicted, or if the row "no communication" is missing.
    """
    rows = read_rows(path)
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["world"], *(row["conditions"][name] for name in _CONDITIONS)), []).append(row)
    found: list[Checked] = []
    for (world, *_), some in sorted(runs.items(), key=lambda item: item[0][0]):
        found += _check_run(some, world, path)
    if not found:
        raise ValueError(f"--check {path} has no row that can be predicted, expected dense, or a method of thinwire's")
    known = {one.row["method"] for one in found} | {NO_COMMUNICATION}
    load = max((row["conditions"].get("load_average") or 0.0) / row["conditions"]["cores"] for row in rows)
    return Outcome(found, sorted({row["method"] for row in rows} - known), load)


def print_check(outcome: Outcome, path: Path) -> None:
    """Print a table of predictions and measurements, and a summary of the errors."""
    print_table(
        f"{path}: predicted and measured",
        ("ranks", "rate", "method", "predicted, ms", "measured, ms", "error", "MB predicted", "MB measured"),
        [
            [
                str(one.row["world"]),
                one.row["rate"],
                one.row["method"],
                f"{1e3 * one.predicted:,.1f}",
                f"{one.row['ms']:,.1f}",
                f"{one.error:+.1%}",
                f"{one.predicted_bytes / 1e6:,.3f}",
                f"{one.row['bytes_per_step'] / 1e6:,.3f}",
            ]
            for one in outcome.rows
        ],
        text=("rate", "method"),
    )
    errors = [abs(one.error) for one in outcome.rows]
    within = sum(error < _GOAL for error in errors)
    print(
        f"{within} of {len(errors)} rows within {_GOAL:.0%}; error of the median row {median(errors):.1%}, "
        f"of the worst {max(errors):.1%}. Bytes were measured with headers."
    )
    if outcome.load > _BUSY:
        print(f"The machine was busy when this was measured: a load average of {outcome.load:.1f} for each core.")
    if outcome.not_predicted:
        print(f"Not predicted: {', '.join(outcome.not_predicted)}.")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file of `thinwire bench link --out`, each with its "conditions".

    Raise ValueError for an unreadable file, for invalid rows, and for rows of a relay or of another machine.
    """
    wanted = "expected what `thinwire bench link --out` writes"
    try:
        rows = [row for row in read(path) if row["kind"] == "link"]
    except OSError as error:
        raise ValueError(f"--check {path} cannot be read ({error.strerror}), expected a file of rows") from None
    except ValueError as error:
        raise ValueError(f"--check {error}; {wanted}") from None
    if not rows:
        raise ValueError(f"--check {path} has no row of a link, {wanted}")
    for row in rows:
        for where, expected in ((row, _FIELDS), (row["conditions"], _CONDITIONS)):
            for name, kind in expected.items():
                if not isinstance(where.get(name), kind) or isinstance(where.get(name), bool):
                    raise ValueError(
                        f"--check {path}: {name} is {where.get(name)!r:.80} in a row of a link; was it changed?"
                    )
        if not 0 < row["ms"] < 1e12 or not 2 <= row["world"] <= 1 << 20:
            raise ValueError(
                f"--check {path}: {row['ms']} ms with {row['world']} ranks, expected times above 0, 2 or more"
            )
        parse_link(row["rate"])
        _check_machine(row["conditions"], path)
    return rows


def _check_machine(under: Row, path: Path) -> None:
    if under.get("links") == "relay":
        raise ValueError(f"--check {path} is of links by a relay, whose own work is not predicted: leave out --relay")
    here = (cpu_model(), cores())
    if (under["cpu"], under["cores"]) != here:
        raise ValueError(
            f"--check {path} is of a machine with {under['cores']} cores of {under['cpu']}, this one has {here[1]} of "
            f"{here[0]}: its codec cannot be measured here; run both on one machine"
        )


def _check_run(rows: Sequence[Row], world: int, path: Path) -> list[Checked]:
    """Predict rows of the same conditions and world size."""
    compute = {row["rate"]: row["ms"] / 1e3 for row in rows if row["method"] == NO_COMMUNICATION}
    if not compute:
        raise ValueError(
            f'--check {path} has no row "{NO_COMMUNICATION}" with {world} ranks, from which the time of computing is '
            f'known: run thinwire bench link with it among the --methods, such as "{NO_COMMUNICATION}" dense'
        )
    under = rows[0]["conditions"]
    model = Model(under["model"], under["parameters"], under["batch"])
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in build_model(model).parameters()]
    found = [(row, method) for row in rows if (method := method_of(row["method"], world)) is not None]
    if not found:
        return []
    methods = list(dict.fromkeys(method for _, method in found))
    measured, nothing = _measure(methods, model=model, ranks=world, under=under, numel=sum(sizes))
    checked = []
    for row, method in found:
        # Scaled to the speed of the machine at that time: the methods at one rate were measured in turns.
        seconds = compute.get(row["rate"], min(compute.values()))
        slows, speed = max(0.0, min(1.0, 2 - under["cores"] / world)), parse_link(row["rate"])
        one = Case(
            Work.of_numbers(
                sum(sizes), seconds=seconds, optimizer=seconds * nothing.optimizer / sum(nothing), sizes=sizes
            ),
            Cluster(world, speed.rate, latency=_LATENCY + speed.round_trip / 2, codec_slows=slows, wire_slows=slows),
            measured.slower(seconds / sum(nothing)),
        ).predict(method)
        checked.append(Checked(row, one.seconds, one.sent))
    return checked


class Probe:
    """A rank that measures itself without communication."""

    def __init__(self, rank: int, size: int, methods: list[Method], model: Model) -> None:
        warnings.filterwarnings("ignore", ".*AdamW on gradients compressed by")  # only the time matters here
        self._methods, self._model = methods, model
        self._bench = Bench(torch.device("cpu"), crowd=max(1.0, size * torch.get_num_threads() / cores()))

    def measure(self) -> RankCosts:
        """Measure the codecs and the steps of this rank."""
        made = dict.fromkeys(method.compressor for method in self._methods if method.compressor is not None)
        codecs, halves = measure_codecs(made, self._bench)
        inputs = make_batch(self._model)

        def loss(module: nn.Module) -> Tensor:
            return F.mse_loss(module(inputs), torch.zeros(()).expand_as(inputs))

        with alone("gloo"):
            compute, more = measure_steps(lambda: (build_model(self._model), loss), self._methods, self._bench)
        return RankCosts(codecs=codecs, halves=halves, compute=compute, more=more)


def _measure(methods: list[Method], model: Model, ranks: int, under: Row, numel: int) -> tuple[Speeds, Split]:
    """Measure with `ranks` processes of this machine at the same time, and combine their results."""
    try:
        with Workers(ranks, under["worker_threads"]) as workers:
            workers.make(ranks, Probe, methods, model)
            answers: list[RankCosts] = workers.ask("measure")
    except WorkerError as error:
        if error.trace:  # a bug in thinwire
            raise RuntimeError(error.trace) from error
        raise ValueError(f"{ranks} ranks could not be measured here: {error}") from None
    crowd = max(1.0, ranks * under["worker_threads"] / under["cores"])
    return combine(answers, methods, numel=numel, origin="measured here", crowd=crowd)
