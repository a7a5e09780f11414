"""One rank of `thinwire train`, from its set-up to the last line that it prints.

The folder of a run, in `runs/` or where --out says, is locked, so that only one training writes into it; docs/train.md
says what is in it.
"""

import fcntl
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from thinwire.collectives import LocalWorld
from thinwire.tools import report
from thinwire.tools.place import Place

from .config import CONFIG_FILE, METRICS_FILE, RUNS, Config, load_config
from .control import Control, pick_device
from .images import load_data
from .learner import rehearse
from .loop import Training
from .metrics import compare, describe_end, say
from .models import model_config

_LOCK_FILE = ".lock"
_MAY_DIFFER = {"out", "data_dir", "download", "workers", "device"}  # Options that may differ between ranks
_LASTING = ("recipe", "model", "data", "optimizer", "compressor", "warmup_steps", "local_steps", "seed")
"""Options that a resumed run cannot change."""


class Rank:
    """A rank of `thinwire train`, in a process that has joined the default process group."""

    def __init__(self, rank: int, world_size: int, config: Config, place: Place | None = None) -> None:
        self._place = place or Place(rank, world_size, local_rank=rank, local_world_size=world_size)
        self._config = config
        self._signals: list[int] = []  # that have come

    def run(self) -> bool:
        """Train and return whether training finished; False if a signal stopped it."""
        with on_signals(self._signals.append), ExitStack() as stack:
            config, device = self._config, pick_device(self._config.device, self._place.local_rank)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            control = Control(self._place, device)
            first, *others = control.gather(config.record())
            if differ := {name for other in others for name in first if other[name] != first[name]} - _MAY_DIFFER:
                names = ", ".join(sorted(differ))
                raise ValueError(f"expected the same options on all ranks, got several values of {names}")
            data = load_data(config.data, config.data_dir, getattr(model_config(config.model), "context", None))
            out = self._choose_folder(control, stack)
            config = replace(config, out=out)
            dense = replace(config, compressor="none", local_steps=0, compare_dense=False, out=out / "dense")
            self._compile_kernels(control)
            results = list[dict[str, Any]]()
            for each in (config, dense) if config.compare_dense else (config,):
                if self._place.local_rank == 0 and each.out is not None:
                    each.out.mkdir(parents=True, exist_ok=True)
                control.gather(None)
                results.append(Training(each, control, data).run(should_stop=lambda: bool(self._signals)))
                if results[-1]["reason"] != "finished":
                    break
            if self._place.rank == 0:
                self._show(results, out)
            return bool(results[-1]["reason"] == "finished")

    def _choose_folder(self, control: Control, stack: ExitStack) -> Path:
        """Return the folder of the run, which rank 0 chooses and locks; raise its error on all ranks."""
        folder, fault = Path(), ""
        if self._place.rank == 0:
            try:
                folder = choose_folder(self._config)
                stack.enter_context(locked(folder))
                check_same_run(self._config, folder)
            except (ValueError, OSError) as error:
                fault = str(error)
        folder, fault = control.gather((folder, fault))[0]
        if fault:
            raise ValueError(fault)
        return Path(folder)

    def _compile_kernels(self, control: Control) -> None:
        """Compile or load the kernels that the run needs, which are kept on disk, before its clock starts."""
        started = time.perf_counter()
        LocalWorld(2, turns=True).run(rehearse, self._config, control.device)
        control.gather(None)
        if self._place.rank == 0:
            say(f"kernels compiled or loaded in {time.perf_counter() - started:.1f} s")

    def _show(self, results: list[dict[str, Any]], folder: Path) -> None:
        try:
            report.write([folder], folder / "report.html")
        except (ValueError, OSError) as error:  # training is done, and its files are written
            say(f"the report could not be made: {error}")
        if results[-1]["reason"] == "finished":
            for name, end in zip((self._config.compressor, "dense"), results, strict=False):
                print(describe_end(name, end))
            if len(results) == 2:
                print(compare(*results))
            print(f"run {folder}, report {folder / 'report.html'}", flush=True)
        else:
            torchrun = "torchrun ... -m " if Place.of_torchrun() is not None else ""
            command = torchrun + shlex.join(["thinwire", "train", f"--out={folder}", "--resume", "auto"])
            print(f"stopped at step {results[-1]['step']}, checkpoint written; go on with: {command}", flush=True)


def choose_folder(config: Config) -> Path:
    """Return the folder of the run, and make it if it is new; raise ValueError if it has a run that is not resumed.

    It is --out, or the first free one of runs/RECIPE, runs/RECIPE-2 ...
    """
    free = (RUNS / (f"{config.recipe}-{number}" if number > 1 else config.recipe) for number in count(1))
    while config.out is None:
        folder = next(free)
        with suppress(FileExistsError):  # another job may have made it just now
            folder.mkdir(parents=True)
            return folder
    if config.resume == "no" and any((config.out / name).exists() for name in (METRICS_FILE, "checkpoints")):
        raise ValueError(f"--out {config.out} holds a run: add --resume auto to go on with it, or give another folder")
    config.out.mkdir(parents=True, exist_ok=True)
    return config.out


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder until this process ends, however it ends; raise ValueError if another process has locked it."""
    with open(folder / _LOCK_FILE, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is in use by another training: wait, or give another --out") from None
        yield


def check_same_run(config: Config, folder: Path) -> None:
    """Raise ValueError if an option differs that a run with checkpoints cannot change. Others, such as steps, may."""
    if not (folder / CONFIG_FILE).exists() or not (folder / "checkpoints").exists():
        return
    saved, here = load_config(folder).record(), config.record()
    for name in _LASTING:
        if here[name] != saved[name]:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {here[name]}, but the run that is resumed has {saved[name]}: leave {flag} out")


@contextmanager
def on_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of a SIGTERM or SIGINT, unless this process ignores it.

    Signals may be repeated: a cluster sends them to all processes, and the parent passes its own on.
    """
    heard = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
