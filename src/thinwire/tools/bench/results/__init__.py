"""`thinwire bench results`: turns the output of `bench link` or `bench recipe` into Markdown tables and a plot.

The tables go between two comment lines of a Markdown file, so that a command next to them writes all figures of a
README and none is written by hand. The two benchmarks have different comment lines. torch is not loaded.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from thinwire.tools.record import Line, read

from ..harness import File, check_file, command_line, pyplot

MARKS = {
    "link": ("<!-- bench results: begin -->", "<!-- bench results: end -->"),
    "recipe": ("<!-- bench loss: begin -->", "<!-- bench loss: end -->"),
}
"""The lines between which tables go, by the benchmark that they are of."""
FOLDER, PATTERN = Path("benchmarks/results"), "link-*.jsonl"
Files = Annotated[Positional[tuple[Path, ...]], arg(metavar="[FILE ...]", help_behavior_hint="")]


@dataclass(frozen=True)
class Options:
    """Tables and a plot of what bench link (step time) or bench recipe (loss over bytes) measured."""

    files: Files = ()
    """What thinwire bench link --out or thinwire bench recipe --out wrote, not both; by default
    benchmarks/results/link-*.jsonl."""
    readme: File = None
    """Put the tables into this Markdown file, between its lines <!-- bench results: begin --> and end; those of
    bench recipe between <!-- bench loss: begin --> and end. Else print them."""
    plot: File = None
    """Write the plot, an SVG, to this file; the tables then show it. Needs matplotlib: pip install 'thinwire[plot]'."""


def run(options: Options) -> int:
    """Write or print the tables and write the plot. Return 0."""
    files = options.files or tuple(sorted(FOLDER.glob(PATTERN)))
    if not files:
        raise ValueError(f"no file {FOLDER / PATTERN} here; give what thinwire bench link --out wrote")
    rows = {file: list(read(file)) for file in files}
    kinds = {lines[0]["kind"]: file for file, lines in rows.items() if lines}
    if "recipe" in kinds and "link" in kinds:
        raise ValueError(
            f"{kinds['recipe']} has rows of bench recipe and {kinds['link']} rows of bench link, expected one of both: "
            "call it twice, with another --plot"
        )
    kind = "recipe" if "recipe" in kinds else "link"
    source: Any
    if kind == "recipe":
        from . import losses as source
    else:
        from . import links as source
    for file, lines in rows.items():
        _check(file, lines, kind=kind, conditions=source.CONDITIONS, row=source.ROW)
    check_file("plot", options.plot)
    if options.plot is not None:
        pyplot()  # raises ValueError if it is not installed
    found, here = source.group(rows), options.readme or Path()
    paragraphs = source.section(found, _link(here, options.plot), lambda path: _link(here, path))
    written = "Tables and plot are" if options.plot is not None else "Tables are"
    text = "\n\n".join([*paragraphs, f"{written} written by `{command_line('bench results', options)}`."])
    if options.readme is None:
        print(text)
    else:
        inside = replaced(options.readme, text, *MARKS[kind])  # raises before anything is written
        options.readme.write_text(inside, encoding="utf-8")
    if options.plot is not None:
        source.draw(found, options.plot)
    return 0


def _check(file: Path, lines: list[Line], *, kind: str, conditions: Sequence[str], row: Sequence[str]) -> None:
    """Raise ValueError unless a file has rows, each of the benchmark and with all that is needed."""
    expected = f"expected what thinwire bench {kind} --out wrote"
    if not lines:
        raise ValueError(f"{file}: no rows, {expected}")
    for line in lines:
        if line["kind"] != kind:
            raise ValueError(f"{file}: a line of kind {line['kind']!r}, {expected}")
        for what, given, names in (("conditions", line["conditions"], conditions), ("a row", line, row)):
            if missing := [name for name in names if name not in given]:
                raise ValueError(f"{file}: {what} without {missing[0]}, {expected}")


def replaced(readme: Path, text: str, begin: str, end: str) -> str:
    """Return the content of the file with `text` between the lines `begin` and `end`."""
    before, found, rest = readme.read_text(encoding="utf-8").partition(begin + "\n")
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{readme} has no line {begin} with a line {end} after it; put them where the tables go")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _link(readme: Path, path: Path | None) -> str:
    """Return a path relative to the README, for use in a link."""
    return "" if path is None else Path(os.path.relpath(path, readme.parent)).as_posix()
