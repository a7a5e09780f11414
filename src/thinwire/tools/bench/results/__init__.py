"""`thinwire bench results`: turns the output of `bench link` or `bench recipe` into Markdown tables and a plot.

The tables go between two comment lines of a Markdown file, so that a command next to them writes all figures of a
README and none is written by hand. The two benchmarks have different comment lines. torch is not loaded.

rows of    are read by   tables by        a plot by
link       sources       markdown         plot
recipe     losses        loss_table       loss_plot
"""

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

BEGIN, END = "<!-- bench results: begin -->", "<!-- bench results: end -->"
LOSS_BEGIN, LOSS_END = "<!-- bench loss: begin -->", "<!-- bench loss: end -->"
FOLDER, PATTERN = Path("benchmarks/results"), "link-*.jsonl"


@dataclass(frozen=True)
class Options:
    """Tables and a plot of what bench link (step time) or bench recipe (loss over bytes) measured."""

    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="[FILE ...]", help_behavior_hint="")] = ()
    """What thinwire bench link --out or thinwire bench recipe --out wrote, not both; by default
    benchmarks/results/link-*.jsonl."""
    readme: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Put the tables into this Markdown file, between its lines <!-- bench results: begin --> and end; those of
    bench recipe between <!-- bench loss: begin --> and end. Else print them."""
    plot: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write the plot, an SVG, to this file; the tables then show it."""


def run(options: Options) -> int:
    """Write or print the tables and write the plot. Return 0."""
    files = options.files or tuple(sorted(FOLDER.glob(PATTERN)))
    if not files:
        raise ValueError(f"no file {FOLDER / PATTERN} here; give what thinwire bench link --out wrote")
    are_losses = _are_losses(files)
    text, drawing = (_of_losses if are_losses else _of_links)(files, options)
    if options.readme is None:
        print(text)
    else:
        begin, end = (LOSS_BEGIN, LOSS_END) if are_losses else (BEGIN, END)
        inside = replaced(options.readme, text, begin, end)  # raises before anything is written
        options.readme.write_text(inside, encoding="utf-8")
    if options.plot is not None:
        options.plot.write_text(drawing(), encoding="utf-8")
    return 0


Made = tuple[str, Callable[[], str]]
"""The tables, and a function that draws the plot."""


def _of_links(files: Sequence[Path], options: Options) -> Made:
    from .markdown import section
    from .plot import plot
    from .sources import read

    sets = read(files)
    return section(sets, *_places(options)), lambda: plot(sets)


def _of_losses(files: Sequence[Path], options: Options) -> Made:
    from .loss_plot import plot
    from .loss_table import section
    from .losses import read

    comparisons = read(files)
    return section(comparisons, *_places(options)), lambda: plot(comparisons)


def _are_losses(files: Sequence[Path]) -> bool:
    """Return whether the files have rows of bench recipe, by the first row of each file."""
    from thinwire.tools.record import read

    kinds = {next((line["kind"] for line in read(file)), None): file for file in files}
    if "recipe" in kinds and "link" in kinds:
        raise ValueError(
            f"{kinds['recipe']} has rows of bench recipe and {kinds['link']} rows of bench link, expected one of both: "
            "call it twice, with another --plot"
        )
    return "recipe" in kinds


def replaced(readme: Path, text: str, begin: str, end: str) -> str:
    """Return the content of the file with `text` between the lines `begin` and `end`."""
    before, found, rest = readme.read_text(encoding="utf-8").partition(begin + "\n")
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{readme} has no line {begin} with a line {end} after it; put them where the tables go")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _places(options: Options) -> tuple[str, str, Callable[[Path], str]]:
    """Return the command, the link to the plot, and a function that returns the link to a file."""
    target = options.readme or Path()
    return _command(options), _seen_from(target, options.plot), lambda path: _seen_from(target, path)


def _seen_from(readme: Path, path: Path | None) -> str:
    """Return a path relative to the README, for use in a link."""
    return "" if path is None else Path(os.path.relpath(path, readme.parent)).as_posix()


def _command(options: Options) -> str:
    words = ["thinwire", "bench", "results", *map(str, options.files)]
    for name in ("readme", "plot"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)
