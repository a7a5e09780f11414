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
