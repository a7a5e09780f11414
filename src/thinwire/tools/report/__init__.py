"""`thinwire report`: one HTML file about one or several trainings, which opens anywhere, offline.

`runs` reads the metrics.jsonl of a run. `page` reduces it to what a screen can show, and joins it with the style sheet
and the scripts of this folder into one file. torch is not imported, so that a report takes a moment on any machine that
has the files.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from thinwire.tools.files import replace_text


@dataclass(frozen=True)
class Options:
    """One HTML page of one or several trainings: loss, accuracy, bytes and time. It opens offline."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]", help_behavior_hint="")] = ()
    """Folders of runs, or their metrics.jsonl. Several are drawn over each other."""
    out: Annotated[Path, arg(metavar="PATH")] = Path("report.html")
    """The file to write."""


def run(options: Options) -> int:
    """Write the page, and print its path and size."""
    size = write(options.runs, options.out)
    print(f"{options.out}: {size / 1000:,.0f} kB; open it in a browser")
    return 0


def write(runs: Sequence[str | Path], out: str | Path) -> int:
    """Write the report of these runs to `out` atomically, and return its size in bytes.

    The dense reference of a run, in RUN/dense, is drawn too.
    """
    from .page import page
    from .runs import find, read

    out = Path(out)
    found = find([Path(path) for path in runs])
    _check(out, [file for _, file in found])
    command = shlex.join(["thinwire", "report", *map(str, runs), "--out", str(out)])
    html = page([read(file, name) for name, file in found], command)
    try:
        replace_text(out, html)  # a browser that reloads the page of a running training never sees half of it
    except OSError as error:
        raise OSError(f"cannot write {out}: {error.strerror}; give another place with --out") from error
    return out.stat().st_size


def _check(out: Path, inputs: list[Path]) -> None:
    """Raise ValueError if the page cannot be written to `out`, or would replace the metrics of a run."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder, expected a file: try --out {out / 'report.html'}")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; create it, or write somewhere else")
    if out.resolve() in inputs:
        raise ValueError(f"--out {out} is a run's own record, which the page would replace: choose another file")
