"""`thinwire bench results`: what `thinwire bench link` wrote, as tables for a README and a plot; torch is not loaded.

The tables go between two lines of a Markdown file, each a comment, so that a README's figures are printed by a command
that stands beside them, and never by hand.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

BEGIN, END = "<!-- bench results: begin -->", "<!-- bench results: end -->"
FOLDER, PATTERN = Path("benchmarks/results"), "link-*.jsonl"


@dataclass(frozen=True)
class Options:
    """Tables and a plot of step time against bandwidth, from rows of bench link."""

    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="[FILE ...]", help_behavior_hint="")] = ()
    """What thinwire bench link --out wrote; by default benchmarks/results/link-*.jsonl."""
    readme: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Put the tables into this Markdown file, between its lines <!-- bench results: begin --> and end; else print."""
    plot: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write the plot, an SVG, to this file; the tables then show it."""


def run(options: Options) -> int:
    """Write what was asked for."""
    from .markdown import section
    from .plot import plot
    from .sources import read

    files = options.files or tuple(sorted(FOLDER.glob(PATTERN)))
    if not files:
        raise ValueError(f"no file {FOLDER / PATTERN} here; give what thinwire bench link --out wrote")
    sets = read(files)
    target = options.readme or Path()
    text = section(sets, _command(options), _seen_from(target, options.plot), lambda path: _seen_from(target, path))
    if options.readme is None:
        print(text)
    else:
        inside = replaced(options.readme, text)  # before anything is written
        options.readme.write_text(inside, encoding="utf-8")
    if options.plot is not None:
        options.plot.write_text(plot(sets), encoding="utf-8")
    return 0


def replaced(readme: Path, text: str) -> str:
    """The file, with `text` between its two lines."""
    before, found, rest = readme.read_text(encoding="utf-8").partition(BEGIN + "\n")
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"{readme} has no line {BEGIN} with a line {END} after it; put them where the tables go")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _seen_from(readme: Path, path: Path | None) -> str:
    """A path as a link in the README has it."""
    return "" if path is None else Path(os.path.relpath(path, readme.parent)).as_posix()


def _command(options: Options) -> str:
    words = ["thinwire", "bench", "results", *map(str, options.files)]
    for name in ("readme", "plot"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)
