"""One rank of `thinwire train`, from its set-up to the last line that it prints."""

import dataclasses
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from thinwire.tools import report
from thinwire.tools.loopback import Counter

from .config import Config
from .control import Control
from .data import Data
from .device import pick_device
from .folder import choose_folder, locked
from .images import load_data
from .loop import Training
from .models import model_config
from .place import Place
from .rehearsal import compile_kernels
from .view import Result, print_results

_MAY_DIFFER = ("out", "data_dir", "download", "workers", "device")


class Rank:
    """A rank of `thinwire train`, in a process that has joined the default process group.

    counter   counts the bytes that this rank sends; by default on the loopback interface, if all ranks are here.
    """

    def __init__(
        self, rank: int, world_size: int, config: Config, place: Place | None = None, counter: Counter | None = None
    ) -> None:
        self._place = place or Place(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
        if counter is None and self._place.on_one_machine:
            counter = Counter("lo", times=world_size)
        self._counter = counter
        self._config = config
        self._signals: list[int] = []
        """Those that have come."""
        self._device = pick_device(config.device, self._place.local_rank)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def run(self) -> bool:
        """Train and return whether training finished; False if a signal stopped it."""
        with on_signals(self._signals.append), ExitStack() as stack:
            control = Control()
            self._compare(control)
            config = self._config
            data = load_data(config.data, config.data_dir, getattr(model_config(config.model), "context", None))
            config = self._with_folder(control, stack)
            assert config.out is not None
            self._compile_seconds = compile_kernels(config, self._place, control, self._device)
            if self._place.rank == 0:
                print(f"kernels compiled or loaded in {self._compile_seconds:.1f} s", file=sys.stderr, flush=True)
            results = [self._train(config, control, data)]
            if config.compare_dense and results[0].finished:
                dense = dataclasses.replace(
                    config, compressor="none", local_steps=0, compare_dense=False, out=config.out / "dense"
                )
                results.append(self._train(dense, control, data))
            if self._place.rank == 0:
                self._show(results, config.out)
            return all(result.finished for result in results)

    def _train(self, config: Config, control: Control, data: Data) -> Result:
        assert config.out is not None
        if self._place.local_rank == 0:
            config.out.mkdir(parents=True, exist_ok=True)
        control.gather(None)
        training = Training(
            config,
            place=self._place,
            control=control,
            device=self._device,
            data=data,
            counter=self._counter,
            compile_seconds=self._compile_seconds,
        )
        return training.run(should_stop=lambda: bool(self._signals))

    def _compare(self, control: Control) -> None:
        """Raise ValueError on all ranks if their options differ, except for those in `_MAY_DIFFER`."""
        record = {name: value for name, value in self._config.record().items() if name not in _MAY_DIFFER}
        first, *others = control.gather(record)
        for rank, other in enumerate(others, start=1):
            for name, value in other.items():
                if value != first[name]:
                    flag = f"--{name.replace('_', '-')}"
                    raise ValueError(f"rank {rank} has {flag} {value} and rank 0 {first[name]}: give all the same")

    def _with_folder(self, control: Control, stack: ExitStack) -> Config:
        """Return the config with the folder of the run, which rank 0 chooses and locks; raise its error on all."""
        folder, fault = None, None
        if self._place.rank == 0:
            try:
                folder = choose_folder(self._config)
                stack.enter_context(locked(folder))
            except (ValueError, OSError) as error:
                fault = str(error)
        folder, fault = control.from_first((folder, fault))
        if fault is not None:
            raise ValueError(fault)
        return dataclasses.replace(self._config, out=folder)

    def _show(self, results: list[Result], folder: Path) -> None:
        try:
            report.write([folder], folder / "report.html")
        except (ValueError, OSError) as error:  # training is done, and its files are written
            print(f"the report could not be made: {error}", file=sys.stderr)
        if all(result.finished for result in results):
            print_results(results, self._place.world_size)
            print(f"run {folder}, report {folder / 'report.html'}", flush=True)
        else:
            command = shlex.join(["thinwire", "train", f"--out={folder}", "--resume", "auto"])
            if Place.of_torchrun() is not None:
                command = f"torchrun ... -m {command}"
            print(f"stopped at step {results[-1].steps}, checkpoint written; go on with: {command}", flush=True)


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
