"""Checkpoints of a run: whole or not there, checked when they are read, and the older ones removed.

    checkpoints/step-00000100/
        model.pt        what is the same on all ranks: weights, torch's optimizer, where the run was
        rank0.pt ...    what is a rank's own: residuals, momentum, buffers, random numbers
        manifest.json   the size and SHA-256 of each file; written last

All of it is written into a hidden folder and synced to disk, which then gets its name: a process that is killed at any
moment leaves the last checkpoint as it was. On machines without a common disk each keeps the files of its own ranks,
and the weights; one rank of each, its leader, looks after the folder.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch

from thinwire.sync.checkpoint import old_ranks

from .control import Control
from .folder import replace_text
from .place import Place

_FORMAT = 1
_MANIFEST, _SHARED = "manifest.json", "model.pt"

State = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    step: int
    shared: State
    own: list[State]
    """Of the old ranks that this one goes on from; its own, if there are as many ranks as there were."""
    same_world: bool


class Checkpoints:
    """Of one rank; all ranks call all methods."""

    def __init__(self, folder: Path, place: Place, control: Control, keep: int, say: Callable[[str], None]) -> None:
        self._folder, self._place, self._control = folder / "checkpoints", place, control
        self._keep, self._say = keep, say
        self.leads = self._choose_leaders()
        """Whether this rank looks after the folder."""

    def save(self, step: int, shared: State, own: State) -> None:
        """OSError on all ranks if one of them could not write its part; what was there before still is."""
        final = self._folder / f"step-{step:08}"
        partial = self._folder / f".{final.name}.partial"
        self._together(lambda: self._prepare(partial) if self.leads else None)
        written = self._together(lambda: self._write(partial, shared, own))
        self._together(lambda: self._publish(partial, final, step, written) if self.leads else None)

    def load(self) -> Loaded | None:
        """The newest that is good on all ranks, or None if there are none at all; says which ones are damaged."""
        found = self._control.gather(sorted(self._steps()))
        fault = "not every rank has the same"
        for step in sorted(set.intersection(*map(set, found)), reverse=True):
            folder = self._folder / f"step-{step:08}"
            manifest, fault_here = self._verify(folder)
            faults = [fault for fault in self._control.gather(fault_here) if fault]
            if not faults:
                assert manifest is not None
                self._set_aside(step)
                return self._read(folder, step, manifest)
            fault = faults[0]
            self._say(f"checkpoint {folder.name} is damaged and not used: {fault}")
        if any(found):
            raise ValueError(
                f"none of the checkpoints in {self._folder} can be used: {fault}; to start anew give another --out"
            )
        return None

    # Writing.

    def _prepare(self, partial: Path) -> None:
        self._folder.mkdir(exist_ok=True)
        for left_over in self._folder.glob(".step-*.partial"):
            shutil.rmtree(left_over)
        partial.mkdir()

    def _write(self, partial: Path, shared: State, own: State) -> dict[str, dict[str, Any]]:
        files = {f"rank{self._place.rank}.pt": own, **({_SHARED: shared} if self.leads else {})}
        return {name: write_file(partial / name, state) for name, state in files.items()}

    def _publish(self, partial: Path, final: Path, step: int, written: list[dict[str, dict[str, Any]]]) -> None:
        everyones = {name: entry for part in written for name, entry in part.items() if (partial / name).exists()}
        files = {**everyones, **written[self._place.rank]}  # another machine's model.pt is not this one's
        manifest = {"format": _FORMAT, "step": step, "world_size": self._place.world_size, "files": files}
        replace_text(partial / _MANIFEST, json.dumps(manifest, indent=1))
        _sync_folder(partial)
        replaced = self._folder / f".{final.name}.replaced.partial"
        if final.exists():
            os.rename(final, replaced)
        os.rename(partial, final)
        shutil.rmtree(replaced, ignore_errors=True)
        _sync_folder(self._folder)
        for old in sorted(self._steps())[: -self._keep]:
            shutil.rmtree(self._folder / f"step-{old:08}")

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        """What it returned on each rank, or one rank's OSError on all of them."""
        try:
            result, fault = action(), None
        except OSError as error:
            result, fault = None, str(error)
        answers = self._control.gather((result, fault))
        for rank, (_, fault) in enumerate(answers):
            if fault is not None:
                raise OSError(f"the checkpoint could not be written by rank {rank}: {fault}; the last one is as it was")
        return [answer for answer, _ in answers]

    # Reading.

    def _steps(self) -> Iterator[int]:
        for path in self._folder.glob("step-*"):
            if path.name.removeprefix("step-").isdecimal():
                yield int(path.name.removeprefix("step-"))

    def _verify(self, folder: Path) -> tuple[State | None, str | None]:
        """The manifest, and what is wrong with it or with a file that this rank needs."""
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != _FORMAT:
                return None, f"{folder / _MANIFEST} is of format {manifest['format']}, expected {_FORMAT}"
            expected = {name: manifest["files"].get(name) for name in [_SHARED, *self._own_names(manifest)]}
        except FileNotFoundError:
            return None, f"{folder / _MANIFEST} is missing"
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None, f"{folder / _MANIFEST} cannot be read as a manifest"
        faults = (_fault(folder / name, entry) for name, entry in expected.items())
        fault = next(filter(None, faults), None)
        return (None, fault) if fault else (manifest, None)

    def _own_names(self, manifest: State) -> list[str]:
        place = self._place
        return [f"rank{old}.pt" for old in old_ranks(place.rank, place.world_size, int(manifest["world_size"]))]

    def _read(self, folder: Path, step: int, manifest: State) -> Loaded:
        own = [_read_file(folder / name) for name in self._own_names(manifest)]
        same_world = manifest["world_size"] == self._place.world_size
        return Loaded(step, _read_file(folder / _SHARED), own, same_world)

    def _set_aside(self, used: int) -> None:
        """What is newer than the one that is used keeps its files under another name: its steps will come again."""
        if self.leads:
            for step in list(self._steps()):
                if step > used:
                    damaged = self._folder / f"damaged-{step:08}"
                    shutil.rmtree(damaged, ignore_errors=True)
                    os.rename(self._folder / f"step-{step:08}", damaged)
        self._control.gather(None)

    def _choose_leaders(self) -> bool:
        """Rank 0, and the first rank of each machine that does not see the folder of rank 0."""
        token = self._control.from_first(os.urandom(8).hex())
        path = self._folder.parent / f".disk-{token}"
        if self._place.rank == 0:
            path.touch()
        self._control.gather(None)
        leads = self._place.rank == 0 or (self._place.local_rank == 0 and not path.exists())
        self._control.gather(None)
        if self._place.rank == 0:
            path.unlink()
        return leads


class _Hashing:
    """A file to write to that keeps the digest of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.hash = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def write_file(path: Path, state: State) -> dict[str, Any]:
    """Its size and digest, once it is on the disk; OSError if it cannot be."""
    with open(path, "wb") as file:
        hashing = _Hashing(file)
        try:
            torch.save(state, hashing)  # type: ignore[arg-type]
        except RuntimeError as error:  # torch's writer hides what the disk said
            raise (error.__cause__ or error.__context__ or OSError(str(error))) from None
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": hashing.hash.hexdigest()}


def _fault(path: Path, expected: dict[str, Any] | None) -> str | None:
    """How a file differs from what was written, if it does."""
    try:
        with open(path, "rb") as file:
            actual = {"bytes": os.fstat(file.fileno()).st_size, "sha256": _digest(file)}
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    if expected is None:
        return f"{path} is not in its manifest"
    if actual["bytes"] != expected["bytes"]:
        return f"{path} has {actual['bytes']:,} bytes of {expected['bytes']:,}"
    return None if actual == expected else f"{path} has other bits than were written"


def _read_file(path: Path) -> State:
    state: State = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _digest(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """So that a name which was given survives a loss of power."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
