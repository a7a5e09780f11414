"""Reads the metrics.jsonl of a run, without the lines that a resume has repeated.

`record.read` is for files that are complete. This file may be of a run that is still going or was killed, so its last
line may be cut off. A run that resumed from a checkpoint repeats the steps after it. Of those steps, the later lines
count.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from thinwire.tools.record import Line

PARTS = ("compute", "compress", "wait", "decode")
"""Parts of a step's time, in the order in which they are stacked."""


class Step(NamedTuple):
    """Metrics of a logged step."""

    step: int
    seconds: float | None
    bytes_sent: float | None
    bytes_dense: float | None
    loss: float | None
    """Loss; None where it was not finite."""
    split: tuple[float, ...] | None
    """Seconds per step, in the order of `PARTS`."""


class Evaluation(NamedTuple):
    """Metrics of an evaluation."""

    step: int
    seconds: float | None
    bytes_sent: float | None
    bytes_dense: float | None
    loss: float | None
    accuracy: float | None


@dataclass
class Run:
    """A run as its metrics.jsonl describes it."""

    name: str
    conditions: Line = field(default_factory=dict)
    """Conditions of the latest start or resume."""
    started: str = ""
    """Date of the first start."""
    resumes: int = 0
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    status: Literal["finished", "stopped", "failed", "unfinished"] = "unfinished"
    """State of the run; "unfinished" if it is still going or was killed."""
    step: int = 0
    """Last step that the run has reached."""
    seconds: float | None = None

    @property
    def rows(self) -> "list[Step | Evaluation]":
        """All steps, followed by all evaluations."""
        return [*self.steps, *self.evaluations]

    @property
    def config(self) -> Mapping[str, Any]:
        """Options of the run, or an empty mapping if the conditions have none."""
        config = self.conditions.get("config")
        return config if isinstance(config, dict) else {}


def read(path: Path, name: str) -> Run:
    """Read the file of a run; raise ValueError if it is empty or damaged."""
    run = Run(name)
    empty = True
    for number, line in _lines(path):
        empty = False
        try:
            _add(run, line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if empty:
        raise ValueError(f"{path} is empty, expected JSON lines: has the run written its first yet?")
    return run


def _lines(path: Path) -> Iterator[tuple[int, Line]]:
    # Invalid UTF-8 becomes a replacement character, and then fails as JSON with its line number.
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as error:
                if not text.endswith("\n"):
                    return  # only the last line can lack a newline: the run was killed while it wrote
                raise ValueError(
                    f"{path}:{number}: not a line of JSON ({error}): the file is damaged; remove the line to do without"
                ) from None
            if not isinstance(line, dict) or "kind" not in line:
                raise ValueError(f"{path}:{number}: expected an object with a kind, given {text.strip()[:80]}")
            yield number, line


def _add(run: Run, line: Line) -> None:
    kind = line["kind"]
    if kind == "conditions":
        _start(run, line)
        return
    if not run.conditions:
        raise ValueError(f"a line of kind {kind!r} before any conditions: is this the record of a training?")
    if kind not in ("step", "evaluation", "end"):
        return  # a kind of a later version
    step = _count(line, "step")
    place = (step, _number(line, "seconds"), _number(line, "bytes_sent"), _number(line, "bytes_dense"))
    if kind == "step":
        run.steps.append(Step(*place, _number(line, "loss"), _split(line)))
    elif kind == "evaluation":
        run.evaluations.append(Evaluation(*place, _number(line, "loss"), _number(line, "accuracy")))
    else:
        reason = line.get("reason")
        run.status = reason if reason in ("finished", "failed") else "stopped"
    run.step = max(run.step, step)
    run.seconds = place[1] if place[1] is not None else run.seconds


def _start(run: Run, line: Line) -> None:
    first = _count({"first_step": 0, **line}, "first_step")
    if run.conditions:
        run.resumes += 1
        # A start at step 0 is another run in the same file; a later one resumes a checkpoint and repeats older lines.
        run.steps = [row for row in run.steps if first and row.step <= first]
        run.evaluations = [row for row in run.evaluations if first and row.step <= first]
    if not first:
        run.started, run.resumes = str(line.get("date", "")), 0
    run.started = run.started or str(line.get("date", ""))
    run.conditions, run.status, run.step = line, "unfinished", first
    run.seconds = max((row.seconds or 0.0 for row in run.rows), default=None)


def _split(line: Line) -> tuple[float, ...] | None:
    split = line.get("split")
    if split is None:
        return None
    if not isinstance(split, dict):
        raise ValueError(f"split {split!r}, expected an object with {', '.join(PARTS)}")
    return tuple(_number(split, part) or 0.0 for part in PARTS)


def _number(line: Line, name: str) -> float | None:
    value = line.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise ValueError(f"{name} {value!r}, expected a number or null")
    return value if abs(value) < math.inf else None


def _count(line: Line, name: str) -> int:
    value = line.get(name)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} {value!r}, expected a whole number, 0 or more")
    return value
