r"""One HTML file made of the files of this folder and the data of the runs, without references to other files.

Strings from the user, such as a run's name, are only in the JSON, in which every < is written as \u003c. So they cannot
end the element that they are in. The scripts put them into the page as text, never as HTML. The content security policy
of the page allows only this script and this style, by their hashes, so that the page cannot fetch anything.

Curves are reduced to the points that a screen can show, without hiding a spike or a gap.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from itertools import pairwise
from string import Template
from typing import Any

from thinwire import __version__
from thinwire.tools.train.metrics import PHASES

from .runs import Row, Run

SCRIPTS = ("uplot/uPlot.iife.min.js", "format.js", "elements.js", "charts.js", "summary.js", "page.js")
"""Scripts, in the order in which they are joined into one. The charts are drawn by uPlot 1.6.32 (uplot/LICENSE)."""
STYLES = ("uplot/uPlot.min.css", "page.css")
_DEEPEST, _LONGEST = 5, 2000
"""Levels of a configuration that become rows of their own, and characters that are shown of a value."""
LIMIT, FEW = 2000, 100
"""Approximate number of points of a curve, which is twice the width of a chart, and of the dense bytes, which hardly
change, and of a stack of areas, which are means."""

Value = float | None
Columns = dict[str, list[Value]]


def page(runs: Sequence[Run], command: str) -> str:
    """Return the whole page; `command` and the date are printed at its end."""
    style = "\n".join(map(_file, STYLES))
    script = '"use strict";\n' + "\n".join(map(_file, SCRIPTS))
    data = {
        "runs": [content(run) for run in runs],
        "parts": PHASES,
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
    }
    return Template(_file("page.html")).substitute(
        style=style, style_hash=_hash(style), script=script, script_hash=_hash(script), data=embedded(data)
    )


def embedded(data: object) -> str:
    r"""Return JSON that is safe inside of a script element.

    >>> embedded("</script><!--")
    '"\\u003c/script\\u003e\\u003c!--"'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def content(run: Run) -> dict[str, Any]:
    """Return all data of one run that the scripts draw."""
    steps, evaluations = run.steps, run.evaluations
    at_steps = [(row.step, row.seconds, row.bytes_sent) for row in steps]
    at_evaluations = [(row.step, row.seconds, row.bytes_sent) for row in evaluations]
    accuracies = [row.accuracy for row in evaluations]
    traffic = curve(at_steps, bytes_per_step(steps, [row.bytes_sent for row in steps]))
    dense = bytes_per_step(steps, [row.bytes_dense for row in steps])
    drawn = set(traffic["step"])
    other = {name: value for name, value in run.conditions.items() if name not in ("kind", "config")}
    return {
        "name": run.name,
        "status": run.status,
        "summary": _summary(run),
        "config": [*_flat("", run.config), *_flat("", other)],
        "loss": curve(at_steps, [row.loss for row in steps]),
        "validation": curve(at_evaluations, [row.loss for row in evaluations]),
        "accuracy": curve(at_evaluations, accuracies if any(a is not None for a in accuracies) else []),
        "traffic": traffic,
        "dense": curve(at_steps, dense, FEW),
        "events": [[row.step, row.events] for row in steps if row.events and row.step in drawn],
        "marks": [mark._replace(seconds=short(mark.seconds), bytes=short(mark.bytes))._asdict() for mark in run.marks],
        "split": stack(at_steps, [row.split for row in steps], len(PHASES)),
        "step_seconds": _step_seconds(run),
        "ranks": [{name: short(value) for name, value in each.items()} for each in run.ranks],
    }


def bytes_per_step(rows: Sequence[Row], totals: Sequence[Value]) -> list[Value]:
    """Return the bytes per step between each line and the one before it; the first line is compared with step 0."""
    result: list[Value] = []
    step, before = 0, 0.0
    for row, total in zip(rows, totals, strict=True):
        if total is None:
            result.append(None)
            continue
        result.append((total - before) / (row.step - step) if row.step > step else None)
        step, before = row.step, total
    return result


def _step_seconds(run: Run) -> dict[str, Value]:
    """Return the seconds per step: the mean over all steps, and the longest of any line."""
    before = [0, *(row.step for row in run.steps)]
    lines = [(sum(row.split), row.step - last) for row, last in zip(run.steps, before, strict=False) if row.split]
    count = sum(steps for _, steps in lines)
    return {
        "mean": short(sum(seconds * steps for seconds, steps in lines) / count) if count else None,
        "longest": short(max((seconds for seconds, _ in lines), default=None)),
    }


def _summary(run: Run) -> dict[str, Any]:
    accuracies = [row.accuracy for row in run.evaluations if row.accuracy is not None]
    sent = max((row for row in run.rows if row.bytes_sent is not None), key=lambda row: row.step, default=None)
    return {
        "step": run.step,
        "steps": short(steps) if isinstance(steps := run.config.get("steps"), int) else None,
        # A list of one or none, because null means a loss that was not finite, and [] means no loss.
        "training": [short(row.loss) for row in run.steps[-1:]],
        "validation": [short(row.loss) for row in run.evaluations[-1:]],
        "accuracy": short(accuracies[-1]) if accuracies else None,
        "bytes": short(sent.bytes_sent) if sent else None,
        "dense": short(sent.bytes_dense) if sent else None,
        "reduction_after_warmup": short(run.reduction_after_warmup),
        "seconds": short(run.seconds),
        "resumes": run.resumes,
        "ranks": _text(run.conditions.get("world_size")),
        "parameters": short(parameters) if isinstance(parameters := run.conditions.get("parameters"), int) else None,
        "compressor": _text(run.config.get("compressor")) + (f": {run.choice}" if run.choice else ""),
        "recipe": _text(run.config.get("recipe")),
        "model": _text(run.config.get("model")),
        "started": run.started,
    }


def _flat(prefix: str, values: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each value, of nested ones too."""
    for name, value in values.items():
        if isinstance(value, dict) and value and depth < _DEEPEST:
            yield from _flat(f"{prefix}{name}.", value, depth + 1)
        else:
            yield f"{prefix}{name}", _text(value)


def _text(value: object) -> str:
    """Return a value as text: a string as it is, None as a dash, and other values as JSON.

    >>> _text("adamw"), _text(0.001), _text(None), _text([1, 2]), _text(True)
    ('adamw', '0.001', '–', '[1, 2]', 'true')
    """
    if value is None:
        return "–"
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "…"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def thin(values: Sequence[Value], limit: int = LIMIT) -> list[int]:
    """Return the indices of the points to draw.

    They are the first and the last point, and of each stretch the lowest point, the highest point and one gap.

    >>> thin([5.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 0.0, None, 1.0, 1.0, 1.0], limit=4)
    [0, 1, 3, 6, 7, 8, 11]
    """
    if len(values) <= limit:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for stretch in stretches(len(values), limit // 2):
        known = [(value, at) for at in stretch if (value := values[at]) is not None]
        if known:
            kept |= {min(known)[1], max(known, key=lambda pair: pair[0])[1]}
        kept |= set([at for at in stretch if values[at] is None][:1])
    return sorted(kept)


def stretches(length: int, count: int) -> list[range]:
    """Split range(length) into `count` ranges of about the same length, without empty ones.

    >>> stretches(7, 3)
    [range(0, 2), range(2, 4), range(4, 7)]
    """
    edges = [length * n // count for n in range(count + 1)]
    return [range(a, b) for a, b in pairwise(edges) if b > a]


def mean(values: Iterable[Value]) -> Value:
    """Return the mean of the values that are not None, or None if there are none.

    >>> mean([1.0, None, 3.0]), mean([None])
    (2.0, None)
    """
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def curve(places: Sequence[tuple[Value, ...]], values: Sequence[Value], limit: int = LIMIT) -> Columns:
    """Return columns of step, seconds, bytes and value, with a column of means if points were left out.

    A mean is that of the stretch around a point. Smoothing starts from the means, because the lowest and highest points
    alone would give a different curve.
    """
    kept = thin(values, limit)
    columns = _columns([places[at] for at in kept])
    columns["value"] = [short(values[at]) for at in kept]
    if len(kept) < len(values):
        means: list[Value] = []
        for stretch in stretches(len(values), limit // 2):
            means += [short(mean(values[at] for at in stretch))] * len(stretch)
        columns["mean"] = [means[at] if values[at] is not None else None for at in kept]
    return columns


def stack(places: Sequence[tuple[Value, ...]], rows: Sequence[Sequence[float] | None], parts: int) -> Columns:
    """Return columns of step, seconds, bytes and each part.

    Each point is the mean over a stretch, so that areas remain shares of the time.
    """
    at = stretches(len(rows), min(FEW, len(rows))) if rows else []
    columns = _columns([places[stretch[-1]] for stretch in at])
    for part in range(parts):
        columns[f"part{part}"] = [
            short(mean(row[part] if (row := rows[n]) is not None else None for n in stretch)) for stretch in at
        ]
    return columns


def short(value: Value) -> Value:
    """Round to six digits, which is enough for a chart and makes the file a third as long; None if not finite.

    >>> short(0.123456789), short(123456789.0), short(3.0), short(float("inf"))
    (0.123457, 123457000.0, 3, None)
    """
    if value is None or not abs(value) < 1e300:  # as large integers cannot become floats
        return None
    if value == int(value) and abs(value) < 2**53:
        value = int(value)
    return value if isinstance(value, int) and abs(value) < 10**7 else float(f"{value:.6g}")


def _columns(places: Sequence[tuple[Value, ...]]) -> Columns:
    return {name: [short(place[n]) for place in places] for n, name in enumerate(("step", "seconds", "bytes"))}
