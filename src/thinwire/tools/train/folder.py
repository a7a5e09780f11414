"""The folder of a run: which one it is, and that nobody else writes into it.

    config.json     the options, resolved
    metrics.jsonl   a line for each step that was logged, each evaluation, and the end
    checkpoints/    see checkpoints.py
    tensorboard/    if it is installed
    weights.pt      the state_dict of the trained model, and
    report.html     a page about it: both are made when training ends
    dense/          a folder like this one, of the dense reference

`runs/` is where runs go that were given no folder.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .config import CONFIG_FILE, RUNS, Config

METRICS_FILE = "metrics.jsonl"
_LOCK_FILE = ".lock"


def choose_folder(config: Config) -> Path:
    """Where the run goes; made if it is new. ValueError if there is a run that was not to be resumed."""
    if config.out is None:
        return _numbered(config.recipe)
    if config.resume == "no" and any((config.out / name).exists() for name in (METRICS_FILE, "checkpoints")):
        raise ValueError(f"--out {config.out} holds a run: add --resume auto to go on with it, or give another folder")
    if config.out.exists() and not config.out.is_dir():
        raise ValueError(f"--out {config.out} is a file, expected a folder or a new name")
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out {config.out} cannot be made: {error.strerror}; give a folder you can write to"
        ) from None
    return config.out


def _numbered(name: str) -> Path:
    """The first of name, name-2, name-3 ... in runs/ that does not exist, made: two jobs cannot take the same."""
    RUNS.mkdir(exist_ok=True)
    number = 1
    while True:
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def write_config(folder: Path, config: Config) -> None:
    replace_text(folder / CONFIG_FILE, json.dumps(config.record(), indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """All of it or nothing: whoever reads the file meanwhile, or after a crash, sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """ValueError if another process holds it. The system lets go of it when the process ends, however it ends."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with open(folder / _LOCK_FILE, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder} is in use by another training: wait for its end, or give another --out"
            ) from None
        yield
