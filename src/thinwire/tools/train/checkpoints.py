"""Checkpoints of a run: written atomically, verified when they are read, and the older ones removed.

    checkpoints/step-00000100/
        model.pt        state that is the same on all ranks: weights, torch's optimizer, position in the run
        rank0.pt ...    state of one rank: residuals, momentum, buffers, random number generators
        manifest.json   the size and SHA-256 of each file; written last

All files are written into a hidden folder and synced to disk. Then the folder is renamed. A process that is killed at
any moment leaves the previous checkpoint intact. On nodes without a shared disk, each node keeps the files of its own
ranks, and the weights. One rank of each such node, the leader, manages the folder.
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

_REPLACED = ".replaced.partial"
"""Suffix of a checkpoint that is about to be replaced by another of the same step."""
_FORMAT = 1
_MANIFEST, _SHARED = "manifest.json", "model.pt"

State = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read."""

    step: int
    shared: State
    own: list[State]
    """States of the old ranks that this rank continues from; only its own if the world size is the same."""
    same_world: bool


class Checkpoints:
    """Saves and loads the checkpoints of a run. Every method is collective: all ranks call it."""

    def __init__(self, folder: Path, place: Place, control: Control, keep: int, say: Callable[[str], None]) -> None:
        self._folder, self._place, self._control = folder / "checkpoints", place, control
        self._keep, self._say = keep, say
        self.leads = self._choose_leaders()
        """Whether this rank manages the folder."""

    def save(self, step: int, shared: State, own: State) -> None:
        """Write a checkpoint; raise OSError on all ranks if one rank cannot write its part.

        In that case the previous checkpoints stay intact.
        """
        final = self._folder / f"step-{step:08}"
        partial = self._folder / f".{final.name}.partial"
        self._together(lambda: self._prepare(partial) if self.leads else None)
        written = self._together(lambda: self._write(partial, shared, own))
        self._together(lambda: self._publish(partial, final, step, written) if self.leads else None)

    def load(self) -> Loaded | None:
        """Return the newest checkpoint that is intact on all ranks, or None if there is no checkpoint.

        Each damaged checkpoint is reported. Raises ValueError if there are checkpoints but none can be used.
        """
        self._together(lambda: self._put_back() if self.leads else None)
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
        self._put_back()
        for left_over in self._folder.glob(".step-*.partial"):
            shutil.rmtree(left_over)
        partial.mkdir()

    def _put_back(self) -> None:
        """Undo an interrupted replacement: give the old checkpoint of a step its name back if there is no new one."""
        for hidden in self._folder.glob(f".step-*{_REPLACED}"):
            final = self._folder / hidden.name.removeprefix(".").removesuffix(_REPLACED)
            if not final.exists():
                os.rename(hidden, final)

    def _write(self, partial: Path, shared: State, own: State) -> dict[str, dict[str, Any]]:
        files = {f"rank{self._place.rank}.pt": own, **({_SHARED: shared} if self.leads else {})}
        return {name: write_file(partial / name, state) for name, state in files.items()}

    def _publish(self, partial: Path, final: Path, step: int, written: list[dict[str, dict[str, Any]]]) -> None:
        everyones = {name: entry for part in written for name, entry in part.items() if (partial / name).exists()}
        files = {**everyones, **written[self._place.rank]}  # the model.pt of this node, not that of another
        manifest = {"format": _FORMAT, "step": step, "world_size": self._place.world_size, "files": files}
        replace_text(partial / _MANIFEST, json.dumps(manifest, indent=1))
        _sync_folder(partial)
        replaced = self._folder / f".{final.name}{_REPLACED}"
        if final.exists():
            os.rename(final, replaced)
        os.rename(partial, final)
        shutil.rmtree(replaced, ignore_errors=True)
        _sync_folder(self._folder)
        for old in sorted(self._steps())[: -self._keep]:
            shutil.rmtree(self._folder / f"step-{old:08}")

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        """Run an action on every rank and return the results by rank; an OSError on one rank is raised on all ranks."""
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
        """Return (manifest, None), or (None, reason) if the manifest or a file that this rank needs is damaged."""
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
        """Rename the checkpoints after the one in use to damaged-*, because training repeats their steps."""
        if self.leads:
            for step in list(self._steps()):
                if step > used:
                    damaged = self._folder / f"damaged-{step:08}"
                    shutil.rmtree(damaged, ignore_errors=True)
                    os.rename(self._folder / f"step-{step:08}", damaged)
        self._control.gather(None)

    def _choose_leaders(self) -> bool:
        """Return whether this rank is a leader.

        Leaders are rank 0, and local rank 0 of each node that does not see the folder of rank 0.
        """
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
    """A writable file that computes the SHA-256 of the data."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.hash = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def write_file(path: Path, state: State) -> dict[str, Any]:
    """Save a state to a file, sync it to disk, and return its size and SHA-256.

    Raises OSError if the file cannot be written.
    """
    with open(path, "wb") as file:
        hashing = _Hashing(file)
        try:
            torch.save(state, hashing)  # type: ignore[arg-type]
        except RuntimeError as error:  # torch's writer hides the error of the disk
            raise (error.__cause__ or error.__context__ or OSError(str(error))) from None
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": hashing.hash.hexdigest()}


def _fault(path: Path, expected: dict[str, Any] | None) -> str | None:
    """Return how a file differs from the size and SHA-256 in the manifest, or None if it does not."""
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
    """Sync a folder to disk, so that a rename in it survives a loss of power."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
