"""Finds the runs on a command line, and reads their metrics.jsonl, without the lines that a resume has repeated.

`record.read` is for files that are complete. This file may be of a run that is still going or was killed, so its last
line may be cut off. A run that resumed from a checkpoint repeats the steps after it. Of those steps, the later lines
count.
"""

import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from thinwire.tools.record import Line, read_lines
from thinwire.tools.train.metrics import PHASES

METRICS = "metrics.jsonl"
DENSE = "dense"  # Name of the folder, in that of a run, that holds its dense reference
_LARGEST, _LARGEST_COUNT = 1e300, 2**53
"""Numbers from here on count as not finite, so that sums of them are finite; steps from here on are refused."""


class Row(NamedTuple):
    """Metrics of a logged step, or of an evaluation."""

    step: int
    seconds: float | None
    bytes_sent: float | None
    bytes_dense: float | None
    loss: float | None  # Loss; None where it was not finite
    accuracy: float | None = None
    split: tuple[float, ...] | None = None  # Seconds per step, in the order of `PHASES`
    events: str = ""  # What sent further bytes since the line before, such as "warm-up, refresh"


class Mark(NamedTuple):
    """A place where a run stopped or was resumed."""

    step: int
    seconds: float | None
    bytes: float | None
    text: str


@dataclass
class Run:
    """A run as its metrics.jsonl describes it."""

    name: str
    conditions: Line = field(default_factory=dict)  # Conditions of the latest start or resume
    started: str = ""  # Date of the first start
    resumes: int = 0
    steps: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    status: Literal["finished", "stopped", "failed", "unfinished"] = "unfinished"
    """State of the run; "unfinished" if it is still going or was killed."""
    step: int = 0  # Last step that the run has reached
    seconds: float | None = None
    reduction_after_warmup: float | None = None
    ranks: list[dict[str, float | None]] = field(default_factory=list)
    """What each rank has sent since the start or the last resume, once the run has ended; replica and shard are None if
    the model is not sharded."""
    marks: list[Mark] = field(default_factory=list)
    choice: str = ""  # The compressor that "auto" has chosen, once it is known

    @property
    def rows(self) -> list[Row]:
        return [*self.steps, *self.evaluations]

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the options of the run, or an empty mapping if the conditions have none."""
        config = self.conditions.get("config")
        return config if isinstance(config, dict) else {}


def read(path: Path, name: str) -> Run:
    """Read the file of a run; raise ValueError if it is empty or damaged."""
    run = Run(name)
    for number, line in read_lines(path, may_be_cut_off=True):
        try:
            _add(run, line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not run.conditions:
        raise ValueError(f"{path} is empty, expected JSON lines: has the run written its first line?")
    return run


def _add(run: Run, line: Line) -> None:
    kind = line["kind"]
    if kind == "conditions":
        _start(run, line)
        return
    if not run.conditions:
        raise ValueError(
            f"a line of kind {reprlib.repr(kind)} before any conditions: is this the record of a training?"
        )
    if kind == "choice" and isinstance(line.get("compressor"), str):
        run.choice = line["compressor"]
    if kind not in ("step", "evaluation", "end"):
        return  # also a kind of another version
    step = _count(line, "step")
    place = (step, _number(line, "seconds"), _number(line, "bytes_sent"), _number(line, "bytes_dense"))
    if kind == "step":
        run.steps.append(Row(*place, _number(line, "loss"), split=_split(line), events=_events(line)))
    elif kind == "evaluation":
        run.evaluations.append(Row(*place, _number(line, "loss"), _number(line, "accuracy")))
    else:
        reason = line.get("reason")
        run.status = reason if reason in ("finished", "failed") else "stopped"
        run.ranks = _ranks(line)
        if run.status != "finished":
            run.marks.append(Mark(*place[:3], run.status))
    later = _number(line, "reduction_after_warmup")
    run.reduction_after_warmup = run.reduction_after_warmup if later is None else later
    run.step = max(run.step, step)
    run.seconds = place[1] if place[1] is not None else run.seconds


def _start(run: Run, line: Line) -> None:
    first = _count({"first_step": 0, **line}, "first_step")
    if run.conditions:
        run.resumes += 1
        # A start at step 0 is another run in the same file; a later one resumes a checkpoint and repeats older lines.
        run.steps = [row for row in run.steps if first and row.step <= first]
        run.evaluations = [row for row in run.evaluations if first and row.step <= first]
        run.marks = _resumed(run, first) if first else []
    if not first:
        run.started, run.resumes, run.choice = "", 0, ""
    run.started = run.started or (line["date"] if isinstance(line.get("date"), str) else "")
    run.conditions, run.status, run.step, run.ranks = line, "unfinished", first, []
    run.seconds = max((row.seconds or 0.0 for row in run.rows), default=None)


def _resumed(run: Run, first: int) -> list[Mark]:
    """Return the marks up to the checkpoint of step `first`, and that of the resume, which says why the run ended."""
    kept = [mark for mark in run.marks if mark.step < first or (mark.step == first and "resumed" in mark.text)]
    where = f" at step {run.step:,}" if run.step > first else ""
    text = "resumed" if run.status == "unfinished" else f"{run.status}{where}, resumed"
    last = max(run.rows, key=lambda row: row.step, default=None)
    return [*kept, Mark(first, last.seconds if last else None, last.bytes_sent if last else None, text)]


def _events(line: Line) -> str:
    events = line.get("events", [])
    if not isinstance(events, list) or not all(isinstance(each, str) for each in events):
        raise ValueError(f"events {reprlib.repr(events)}, expected a list of names")
    return ", ".join(events)


def _split(line: Line) -> tuple[float, ...] | None:
    split = line.get("split")
    if split is None:
        return None
    if not isinstance(split, dict):
        raise ValueError(f"split {reprlib.repr(split)}, expected an object with {', '.join(PHASES)}")
    return tuple(_number(split, part) or 0.0 for part in PHASES)


def _ranks(line: Line) -> list[dict[str, float | None]]:
    ranks = line.get("ranks", [])
    if not isinstance(ranks, list) or not all(isinstance(each, dict) for each in ranks):
        raise ValueError(f"ranks {reprlib.repr(ranks)}, expected a list of objects")
    return [
        {
            "rank": _count(each, "rank"),
            **{name: _count(each, name) if name in each else None for name in ("replica", "shard")},
            "between": _number(each, "bytes_between_nodes"),
            "inside": _number(each, "bytes_inside_nodes"),
            "dense": _number(each, "bytes_dense"),
        }
        for each in ranks
    ]


def _number(line: Line, name: str) -> float | None:
    value = line.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise ValueError(f"{name} {reprlib.repr(value)}, expected a number or null")
    return float(value) if abs(value) < _LARGEST else None  # also None for NaN


def _count(line: Line, name: str) -> int:
    value = line.get(name)
    if type(value) is not int or not 0 <= value < _LARGEST_COUNT:
        raise ValueError(f"{name} {reprlib.repr(value)}, expected a whole number, from 0 to {_LARGEST_COUNT:,}")
    return value


def find(paths: list[Path]) -> list[tuple[str, Path]]:
    """Return the name of each run on the page and its file, each followed by that of its dense reference.

    A reference that does not exist, or is given itself, is left out.
    """
    if not paths:
        raise ValueError("no run given, expected folders with a metrics.jsonl: thinwire report RUN [RUN ...]")
    given = [_metrics(path) for path in paths]
    for file, count in Counter(given).items():
        if count > 1:
            raise ValueError(f"the run {file.parent} is given {count} times: give it once")
    found: list[Path] = []
    for file in given:
        dense = file.parent / DENSE / METRICS
        found += [file, dense] if dense.is_file() and dense not in given else [file]
    return list(zip(_names(found), found, strict=True))


def _metrics(path: Path) -> Path:
    file = path / METRICS if path.is_dir() else path
    if file.is_file():
        return file.resolve()
    if path.is_dir():
        raise ValueError(f"{path} is not a run: it has no {METRICS}. Expected a folder that a training wrote")
    raise ValueError(f"there is no run {path}, expected a folder with a {METRICS}, or that file itself")


def _names(files: list[Path]) -> list[str]:
    """Return the shortest end of each folder's path that is unique.

    A dense reference has the name of its run and a suffix.
    """
    owners = [_owner(file) for file in files]
    folders = {folder for folder, _ in owners}

    def shortest(folder: Path) -> str:
        ends = (folder.parts[-depth:] for depth in range(1, len(folder.parts) + 1))
        return "/".join(next(end for end in ends if sum(one.parts[-len(end) :] == end for one in folders) == 1))

    return [shortest(folder) + suffix for folder, suffix in owners]


def _owner(file: Path) -> tuple[Path, str]:
    """Return the folder that a run is named after, and the suffix of the name."""
    folder = file.parent if file.name == METRICS else file.with_suffix("")
    if folder.name == DENSE and (folder.parent / METRICS).is_file():
        return folder.parent, f" {DENSE}"
    return folder, ""
