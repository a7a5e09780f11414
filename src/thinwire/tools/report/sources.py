"""Finds the files of the runs on a command line, and their names on the page."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

METRICS = "metrics.jsonl"
DENSE = "dense"
"""Name of the folder, in that of a run, that holds its dense reference."""


class Source(NamedTuple):
    """A run: its name on the page, and its file."""

    name: str
    metrics: Path
    """Absolute path of the file, usually metrics.jsonl."""


def find(paths: list[Path]) -> list[Source]:
    """Return the file of each run, each followed by that of its dense reference.

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
    return [Source(name, file) for name, file in zip(_names(found), found, strict=True)]


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
    depths = dict.fromkeys((folder for folder, _ in owners), 1)
    while True:
        names = {folder: _end(folder, depth) for folder, depth in depths.items()}
        count = Counter(names.values())
        alike = [folder for folder in depths if count[names[folder]] > 1 and depths[folder] < len(folder.parts)]
        if not alike:
            return [names[folder] + suffix for folder, suffix in owners]
        for folder in alike:
            depths[folder] += 1


def _owner(file: Path) -> tuple[Path, str]:
    """Return the folder that a run is named after, and the suffix of the name."""
    folder = file.parent if file.name == METRICS else file.with_suffix("")
    if folder.name == DENSE and (folder.parent / METRICS).is_file():
        return folder.parent, f" {DENSE}"
    return folder, ""


def _end(folder: Path, depth: int) -> str:
    """Return the last parts of a path.

    >>> _end(Path("/runs/monday/a"), 1), _end(Path("/runs/monday/a"), 2)
    ('a', 'monday/a')
    """
    return "/".join(folder.parts[-depth:])
