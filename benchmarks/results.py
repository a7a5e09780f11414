"""`python -m benchmarks results`: Markdown tables of what `link` or `recipe` measured, and a plot of loss over time.

The tables go between two comment lines of a Markdown file, so that a command next to them writes all figures of a
README and none is written by hand. The two benchmarks have different comment lines. torch is not loaded.
"""

import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from . import results_link, results_recipe
from .harness import File, Line, check_file, command_line, read

MARKS = {
    "link": ("<!-- bench results: begin -->", "<!-- bench results: end -->"),
    "recipe": ("<!-- bench loss: begin -->", "<!-- bench loss: end -->"),
}
"""The lines between which tables go, by the benchmark that they are of."""
FOLDER, PATTERN = Path("benchmarks/results"), "link-gpt-*.jsonl"
Files = Annotated[Positional[tuple[Path, ...]], arg(metavar="[FILE ...]", help_behavior_hint="")]


@dataclass(frozen=True)
class Options:
    """Tables of what link (step time) or recipe (loss and bytes) measured, and a plot of loss over time."""

    files: Files = ()
    """What link --out or recipe --out wrote, not both; by default benchmarks/results/link-gpt-*.jsonl."""
    readme: File = None
    """Put the tables into this Markdown file, between its lines <!-- bench results: begin --> and end; those of recipe
    between <!-- bench loss: begin --> and end. Else print them."""
    plot: File = None
    """Write a plot of loss over time, an SVG, of what recipe --link --out wrote. Needs matplotlib."""


def run(options: Options) -> int:
    """Write or print the tables, and write the plot. Return 0."""
    files = options.files or tuple(sorted(FOLDER.glob(PATTERN)))
    if not files:
        raise ValueError(f"no file {FOLDER / PATTERN} here; give what python -m benchmarks link --out wrote")
    rows = {file: list(read(file)) for file in files}
    kinds = {lines[0]["kind"]: file for file, lines in rows.items() if lines}
    if "recipe" in kinds and "link" in kinds:
        raise ValueError(
            f"{kinds['recipe']} has rows of recipe, {kinds['link']} rows of link, expected one: call it twice"
        )
    kind = "recipe" if "recipe" in kinds else "link"
    source: Any = results_recipe if kind == "recipe" else results_link
    for file, lines in rows.items():
        _check(file, lines, kind, {"conditions": source.CONDITIONS, "a row": source.ROW})
    found, here = source.group(rows), options.readme or Path()
    if kind == "recipe":
        results_recipe.check(found)
    paragraphs = source.section(found, lambda path: Path(os.path.relpath(path, here.parent)).as_posix())
    text = "\n\n".join([*paragraphs, f"Tables are written by `{command_line('results', options)}`."])
    if options.plot is not None:
        if not all(line["conditions"].get("link") for lines in rows.values() for line in lines) or kind == "link":
            raise ValueError(f"--plot {options.plot}, expected rows of recipe --link, which have times")
        check_file("plot", options.plot)
        plt = _pyplot()  # raises ValueError if it is not installed
    if options.readme is None:
        print(text)
    else:
        inside = replaced(options.readme, text, *MARKS[kind])  # raises before anything is written
        options.readme.write_text(inside, encoding="utf-8")
    if options.plot is not None:
        figure = results_recipe.draw(found, plt)
        _save_svg(figure, options.plot)
        plt.close(figure)
    return 0


def _check(file: Path, lines: list[Line], kind: str, names: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError unless a file has rows, each of the benchmark and with all that is needed."""
    expected = f"expected what python -m benchmarks {kind} --out wrote"
    if not lines:
        raise ValueError(f"{file}: no rows, {expected}")
    for line in lines:
        if line["kind"] != kind:
            raise ValueError(f"{file}: a line of kind {line['kind']!r}, {expected}")
        for what, given in (("conditions", line["conditions"]), ("a row", line)):
            if missing := [name for name in names[what] if name not in given]:
                raise ValueError(f"{file}: {what} without {missing[0]}, {expected}")


def replaced(readme: Path, text: str, begin: str, end: str) -> str:
    before, found, rest = readme.read_text(encoding="utf-8").partition(begin + "\n")
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{readme} has no line {begin} with a line {end} after it; put them where the tables go")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _pyplot() -> Any:
    """Return matplotlib's pyplot, set up for small SVGs. Raises ValueError if it is not installed."""
    try:
        import matplotlib
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("svg")
    # Text stays text, and a second run writes the same bytes.
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "thinwire", "font.size": 9})
    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
    pyplot.rcParams.update({"grid.color": "#ddd", "legend.frameon": False, "axes.axisbelow": True})
    return pyplot


def _save_svg(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib without a date and with few digits, so that the file is small and reproducible."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    text = re.sub(r"(\.\d{2})\d+(?=[^<>]*>)", r"\1", drawn.getvalue())  # inside of tags alone
    path.write_text(re.sub(r"\s*\n\s*", "\n", text), encoding="utf-8")
