"""`thinwire bench results`: what `thinwire bench link` or `bench recipe` wrote, as tables for a README and a plot.

The tables go between two lines of a Markdown file, each a comment, so that a README's figures are printed by a command
that stands beside them, and never by hand. Rows of the two benchmarks have lines of their own. torch is not loaded.

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
    """Write what was asked for."""
    files = options.files or tuple(sorted(FOLDER.glob(PATTERN)))
    if not files:
        raise ValueError(f"no file {FOLDER / PATTERN} here; give what thinwire bench link --out wrote")
    are_losses = _are_losses(files)
    text, drawing = (_of_losses if are_losses else _of_links)(files, options)
    if options.readme is None:
        print(text)
    else:
        begin, end = (LOSS_BEGIN, LOSS_END) if are_losses else (BEGIN, END)
        inside = replaced(options.readme, text, begin, end)  # before anything is written
        options.readme.write_text(inside, encoding="utf-8")
    if options.plot is not None:
        options.plot.write_text(drawing(), encoding="utf-8")
    return 0


Made = tuple[str, Callable[[], str]]
"""The tables, and what draws the plot."""


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
    """Return whether rows are of bench recipe, by the first of each file."""
    from thinwire.tools.record import read

    kinds = {next((line["kind"] for line in read(file)), None): file for file in files}
    if "recipe" in kinds and "link" in kinds:
        raise ValueError(
            f"{kinds['recipe']} has rows of bench recipe and {kinds['link']} rows of bench link, expected one of both: "
            "call it twice, with another --plot"
        )
    return "recipe" in kinds


def replaced(readme: Path, text: str, begin: str, end: str) -> str:
    """Return the file with `text` between its two lines."""
    before, found, rest = readme.read_text(encoding="utf-8").partition(begin + "\n")
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{readme} has no line {begin} with a line {end} after it; put them where the tables go")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _places(options: Options) -> tuple[str, str, Callable[[Path], str]]:
    """Return the command, the link to the plot, and what returns the link to a file."""
    target = options.readme or Path()
    return _command(options), _seen_from(target, options.plot), lambda path: _seen_from(target, path)


def _seen_from(readme: Path, path: Path | None) -> str:
    """A path as a link in the README has it."""
    return "" if path is None else Path(os.path.relpath(path, readme.parent)).as_posix()


def _command(options: Options) -> str:
    words = ["thinwire", "bench", "results", *map(str, options.files)]
    for name in ("readme", "plot"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)
