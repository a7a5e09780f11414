"""Checkpoints of a run: written atomically, verified when they are read, and the older ones removed.

    checkpoints/step-00000100/
        model.pt        state that is the same on all ranks: weights, torch's optimizer, position in the run
        rank0.pt ...    state of one rank: residuals, momentum, buffers
        manifest.json   the size and SHA-256 of each file; written last

All files are written into a hidden folder and synced to disk. Then the folder is renamed, so that a process that is
killed leaves the previous checkpoint intact. On nodes without a shared disk, each node keeps the weights and files of
its own ranks. One rank of each such node, the leader, manages the folder.
"""

import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinwire.sync.checkpoint import DamagedError, old_ranks
from thinwire.tools.files import replace_text, replacing, sha256_of

from .control import Control

FORMAT = 2  # Version of the files. Format 1 also had the options of the run, and states of older optimizers
_MANIFEST, _SHARED = "manifest.json", "model.pt"

State = dict[str, Any]

_UNREADABLE = (
    DamagedError, OSError, pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, AttributeError,
    IndexError, OverflowError,
)  # fmt: skip
"""What torch and thinwire raise for a file that is something else. RuntimeError includes RecursionError."""


class Checkpoints:
    """Saves and loads the checkpoints of a run. Every method is collective: all ranks call it."""

    def __init__(self, folder: Path, control: Control, keep: int, say: Callable[[str], None]) -> None:
        self._folder, self._place, self._control = folder / "checkpoints", control.place, control
        self._keep, self._say = keep, say
        self.leads = self._choose_leaders()  # Whether this rank manages the folder

    def save(self, step: int, shared: State, own: State) -> None:
        """Write a checkpoint; if one rank cannot, raise OSError on all, and leave the previous ones as they are."""
        hidden = self._folder / f".{self._of(step).name}.partial"
        files = {f"rank{self._place.rank}.pt": own} | ({_SHARED: shared} if self.leads else {})
        self._together(lambda: self._prepare(hidden), led=True)
        written = self._together(lambda: {name: write_file(hidden / name, state) for name, state in files.items()})
        everyones = self._control.gather(written)
        self._together(lambda: self._publish(hidden, step, everyones), led=True)

    def load(self, use: Callable[[int, State, list[State]], None]) -> int | None:
        """Continue from the newest checkpoint that is intact on all ranks, and return its step; None if there is none.

        use   continues from (step, shared, own): `own` has the states of the old ranks that this rank continues from.
              If it raises any of `_UNREADABLE`, the checkpoint is reported as damaged, and the one before it is used.

        Raises ValueError if there are checkpoints but none can be used.
        """
        found = self._control.gather(sorted(self._steps()))
        fault = "not every rank has the same"
        common: set[int] = set.intersection(*map(set, found))
        for step in sorted(common, reverse=True):
            read, faults = self._attempt(partial(self._read, step))
            if not faults:
                _, faults = self._attempt(partial(use, step, *read))
            if not faults:
                self._together(partial(self._set_aside, step), led=True)
                return step
            fault = faults[0]
            self._say(f"checkpoint {self._of(step).name} is damaged and not used: {fault}")
        if any(found):
            raise ValueError(
                f"none of the checkpoints in {self._folder} can be used: {fault}; to start anew give another --out"
            )
        return None

    def _of(self, step: int) -> Path:
        return self._folder / f"step-{step:08}"

    def _steps(self) -> Iterator[int]:
        """Yield the steps of all checkpoints. Folders with other names, such as step-5, are not ours."""
        for path in self._folder.glob("step-*"):
            if re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,17})", path.name) and path.is_dir():
                yield int(path.name.removeprefix("step-"))

    def _prepare(self, hidden: Path) -> None:
        for left_over in self._folder.glob(".step-*.partial"):
            shutil.rmtree(left_over)
        hidden.mkdir(parents=True)

    def _publish(self, hidden: Path, step: int, written: list[dict[str, dict[str, Any]]]) -> None:
        everyones = {name: fact for part in written for name, fact in part.items() if (hidden / name).exists()}
        files = {**everyones, **written[self._place.rank]}  # the model.pt of this node, not that of another
        manifest = {"format": FORMAT, "step": step, "world_size": self._place.world_size, "files": files}
        replace_text(hidden / _MANIFEST, json.dumps(manifest, indent=1))
        _sync_folder(hidden)
        shutil.rmtree(self._of(step), ignore_errors=True)  # another run's, on a disk of this node alone
        os.rename(hidden, self._of(step))
        _sync_folder(self._folder)
        for old in sorted(self._steps())[: -self._keep]:
            shutil.rmtree(self._of(old))

    def _together(self, action: Callable[[], Any], *, led: bool = False) -> Any:
        """Run an action on every rank, or with `led` where this rank leads; an OSError is raised on all ranks."""
        result, faults = self._attempt(action if self.leads or not led else lambda: None, OSError)
        if faults:
            raise OSError(f"the checkpoint could not be written by {faults[0]}; the last one is as it was")
        return result

    def _attempt(self, action: Callable[[], Any], errors: Any = _UNREADABLE) -> tuple[Any, list[str]]:
        """Run an action on every rank; return the result here, and the faults of all ranks."""
        result, fault = None, None
        try:
            result = action()
        except errors as error:
            fault = f"rank {self._place.rank}: {' '.join(str(error).split())[:300]}"
        return result, [each for each in self._control.gather(fault) if each]

    def _read(self, step: int) -> tuple[State, list[State]]:
        """Read the files that this rank needs, for `use`; raise DamagedError if one is missing or damaged."""
        folder = self._of(step)
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            files, world_size, version = manifest["files"], manifest["world_size"], manifest["format"]
            if type(version) is not int or type(world_size) is not int or not isinstance(files, dict):
                raise TypeError("expected a format, a number of ranks and files")
            olds = old_ranks(self._place.rank, self._place.world_size, world_size)
        except (*_UNREADABLE, ValueError) as error:
            raise DamagedError(f"{_MANIFEST} cannot be read as a manifest: {error}") from None
        if version != FORMAT:
            raise DamagedError(f"format {version}, and this version of thinwire reads format {FORMAT}")
        names = [_SHARED]
        for old in olds:  # ends with the first that is missing: the manifest may name any number of ranks
            names.append(f"rank{old}.pt")
            _check_file(folder / names[-1], files.get(names[-1]))
        _check_file(folder / _SHARED, files.get(_SHARED))
        shared, *own = [_load_state(folder / name) for name in names]
        return shared, own

    def _set_aside(self, used: int) -> None:
        """Rename the checkpoints after the one in use to damaged-*, because training repeats their steps."""
        for step in [step for step in self._steps() if step > used]:
            damaged = self._folder / f"damaged-{step:08}"
            shutil.rmtree(damaged, ignore_errors=True)
            os.rename(self._of(step), damaged)

    def _choose_leaders(self) -> bool:
        """Return whether this rank is rank 0, or local rank 0 of a node that does not see the folder of rank 0."""
        path = self._folder.parent / f".disk-{self._control.gather(os.urandom(8).hex())[0]}"
        if self._place.rank == 0:
            path.touch()
        self._control.gather(None)
        leads = self._place.rank == 0 or (self._place.local_rank == 0 and not path.exists())
        self._control.gather(None)
        if self._place.rank == 0:
            path.unlink()
        return leads


def write_file(path: Path, state: State) -> dict[str, Any]:
    """Save a state to a file atomically, and return its size and SHA-256; raise OSError if it cannot be written."""
    with replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's writer hides the error of the disk
            raise (error.__cause__ or error.__context__ or OSError(str(error))) from None
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _check_file(path: Path, expected: object) -> None:
    """Raise DamagedError if a file differs from the size and SHA-256 in the manifest."""
    if not isinstance(expected, dict):
        raise DamagedError(f"{path.name} is not in its manifest")
    if path.stat().st_size != expected.get("bytes") or sha256_of(path) != expected.get("sha256"):
        raise DamagedError(f"{path.name} has other bits than were written")


def _load_state(path: Path) -> State:
    """Read a file of torch.save, without running what a pickle may contain."""
    try:
        if not zipfile.is_zipfile(path):  # a plain pickle, as old versions of torch wrote it, is not one of ours
            raise ValueError("expected a file of torch.save")
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except ValueError as error:
        raise DamagedError(f"{path.name}: {error}") from None
    return state


def _sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that a rename in it survives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
