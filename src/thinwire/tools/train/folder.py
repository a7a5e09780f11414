"""The folder of a run, in `runs/` or where --out says, and a lock, so that only one process writes into it.

config.json     the values of all options
metrics.jsonl   a line for each logged step, each evaluation, and the end
checkpoints/    see checkpoints.py
tensorboard/    logs for TensorBoard, if it is installed
weights.pt      the state_dict of the trained model; written when training ends
report.html     a page about the run; written when training ends
dense/          a folder like this one, of the dense reference
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from thinwire.tools.files import replace_text

from .config import CONFIG_FILE, METRICS_FILE, RUNS, Config

_LOCK_FILE = ".lock"


def choose_folder(config: Config) -> Path:
    """Return the folder of the run, and make it if it is new.

    Raises ValueError if the folder has a run and the config does not resume it, or if it cannot be made.
    """
    if config.out is None:
        return _numbered(config.recipe)
    if config.resume == "no" and any((config.out / name).exists() for name in (METRICS_FILE, "checkpoints")):
        raise ValueError(f"--out {config.out} holds a run: add --resume auto to go on with it, or give another folder")
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out {config.out} cannot be made: {error.strerror}; give a folder you can write to"
        ) from None
    return config.out


def _numbered(name: str) -> Path:
    """Make and return the first of name, name-2, name-3 ... in runs/ that does not exist, also for another job."""
    RUNS.mkdir(exist_ok=True)
    for number in count(1):
        folder = RUNS / (f"{name}-{number}" if number > 1 else name)
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def write_config(folder: Path, config: Config) -> None:
    """Write the options to config.json."""
    replace_text(folder / CONFIG_FILE, json.dumps(config.record(), indent=2) + "\n")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder; raise ValueError if another process has locked it.

    The system releases the lock when the process ends, however it ends. There is no lock on Windows.
    """
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
