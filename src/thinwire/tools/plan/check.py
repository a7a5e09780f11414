"""Compare predictions with measurements: predict the rows of a file of `thinwire bench link --out`.

A prediction takes from the file only what a user would give: the rate, the number of ranks, the model's shapes, and the
time of a step without communication (the row "no communication" of the same world size). The costs of codecs and
optimizers are measured again, by ranks that do not communicate, as many at a time as in the rows. So the rows must come
from this machine. PowerSGD is not part of thinwire and is not predicted.

Rows are read strictly, because a prediction from invalid values would look like any other prediction.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from thinwire.testing.pool import RankError, Workers
from thinwire.tools.bench.harness import print_table
from thinwire.tools.bench.link.rank import build_model, make_loss
from thinwire.tools.bench.link.settings import Model
from thinwire.tools.bench.methods import NO_COMMUNICATION
from thinwire.tools.record import cores, cpu_model, read
from thinwire.tools.units import parse_link

from .cluster import Cluster
from .costs import Speeds, Work, of_sizes
from .measure import Bench, RankCosts, Split, alone, combine, measure_codecs, measure_steps
from .methods import Method, method_of
from .model import Case, Prediction

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


def check(path: Path) -> None:
    """Predict the rows of the file, except those of methods that cannot be predicted, and print the errors.

    Raise ValueError if no row can be predicted, or if the row "no communication" is missing.
    """
    rows = read_rows(path)
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["world"], *(row["conditions"][name] for name in _CONDITIONS)), []).append(row)
    found: list[tuple[Row, Prediction]] = []
    for (world, *_), some in sorted(runs.items(), key=lambda item: item[0][0]):
        found += _check_run(some, world, path)
    if not found:
        raise ValueError(f"--check {path} has no row that can be predicted, expected dense, or a method of thinwire's")
    errors = [1e3 * one.seconds / row["ms"] - 1 for row, one in found]
    print_table(
        f"{path}: predicted and measured",
        [
            {
                "ranks": str(row["world"]),
                "rate": row["rate"],
                "method": row["method"],
                "predicted, ms": f"{1e3 * one.seconds:,.1f}",
                "measured, ms": f"{row['ms']:,.1f}",
                "error": f"{error:+.1%}",
                "MB predicted": f"{one.sent / 1e6:,.3f}",
                "MB measured": f"{row['bytes_per_step'] / 1e6:,.3f}",
            }
            for (row, one), error in zip(found, errors, strict=True)
        ],
        text=("rate", "method"),
    )
    sizes = sorted(map(abs, errors))
    within = sum(size < _GOAL for size in sizes)
    print(
        f"{within} of {len(sizes)} rows within {_GOAL:.0%}; error of the median row {median(sizes):.1%}, "
        f"of the worst {sizes[-1]:.1%}. Bytes were measured with headers."
    )
    load = max((row["conditions"].get("load_average") or 0.0) / row["conditions"]["cores"] for row in rows)
    if load > _BUSY:
        print(f"The machine was busy when this was measured: a load average of {load:.1f} for each core.")
    not_predicted = {row["method"] for row in rows} - {row["method"] for row, _ in found} - {NO_COMMUNICATION}
    if not_predicted:
        print(f"Not predicted: {', '.join(sorted(not_predicted))}.")


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
        under, here = row["conditions"], (cpu_model(), cores())
        if under.get("links") == "relay":
            raise ValueError(
                f"--check {path} is of links by a relay, whose own work is not predicted: leave out --relay"
            )
        if (under["cpu"], under["cores"]) != here:
            raise ValueError(
                f"--check {path} is of a machine with {under['cores']} cores of {under['cpu']}, this one has {here[1]} "
                f"of {here[0]}: its codec cannot be measured here; run both on one machine"
            )
    return rows


def _check_run(rows: Sequence[Row], world: int, path: Path) -> list[tuple[Row, Prediction]]:
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
        case = Case(
            Work.of_step(of_sizes(sizes), seconds, optimizer=seconds * nothing.optimizer / sum(nothing)),
            Cluster(world, speed.rate, latency=_LATENCY + speed.round_trip / 2, codec_slows=slows, wire_slows=slows),
            measured.slower(seconds / sum(nothing)),
        )
        checked.append((row, case.predict(method)))
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
        with alone("gloo"):
            compute, more = measure_steps(
                lambda: (build_model(self._model), make_loss(self._model)), self._methods, self._bench
            )
        return RankCosts(codecs=codecs, halves=halves, compute=compute, more=more)


def _measure(methods: list[Method], model: Model, ranks: int, under: Row, numel: int) -> tuple[Speeds, Split]:
    """Measure with `ranks` processes of this machine at the same time, and combine their results."""
    try:
        with Workers(ranks, under["worker_threads"]) as workers:
            workers.form(ranks, Probe, methods, model)
            answers: list[RankCosts] = workers.ask("measure")
    except RankError as error:
        if error.trace:  # a bug in thinwire
            raise RuntimeError(error.trace) from error
        raise ValueError(f"{ranks} ranks could not be measured here: {error}") from None
    crowd = max(1.0, ranks * under["worker_threads"] / under["cores"])
    return combine(answers, methods, numel=numel, origin="measured here", crowd=crowd)
