"""What goes wrong in a training by `thinwire train`: objects that replace something in the processes of its ranks.

`install(patch)` calls patch(owner, name, value) for what it replaces.
"""

import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from support.signals import signal_me
from thinwire.sync.step import Step
from thinwire.sync.synchronizer import Synchronizer
from thinwire.testing import Fault, inject
from thinwire.tools.train import loop, rank
from thinwire.tools.train.images import Images
from thinwire.tools.train.learner import Learner

Patch = Callable[[Any, str, Any], object]


def around_steps(patch: Patch, around: Callable[[int], AbstractContextManager[object] | None]) -> None:
    """Call `around` with the number of each step, from 1, before it; what it returns is open during the step."""
    learn, steps = Learner.learn, 0

    def learn_inside(learner: Learner, *args: Any) -> None:
        nonlocal steps
        steps += 1
        with around(steps) or nullcontext():
            learn(learner, *args)

    patch(Learner, "learn", learn_inside)


class InSteps:
    """Faults of `thinwire.testing`, before the backward pass of their step. Steps count from 1."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults

    def install(self, patch: Patch) -> None:
        around_steps(patch, lambda step: inject(self.faults, step))


@dataclass(frozen=True)
class FullDisk(Fault):
    """A file grows until the disk is full; a few lines still fit."""

    path: Path

    @contextmanager
    def strike(self, group: Any, parameters: list[Tensor]) -> Iterator[None]:
        with open(self.path, "wb") as file:
            with suppress(OSError):
                while True:
                    os.write(file.fileno(), bytes(4096))
            os.truncate(file.fileno(), os.fstat(file.fileno()).st_size - 16384)
        yield


@dataclass(frozen=True)
class SignalToParent(Fault):
    """The parent process gets SIGTERM, and this rank waits until it has one, too."""

    @contextmanager
    def strike(self, group: Any, parameters: list[Tensor]) -> Iterator[None]:
        came: list[int] = []
        before = signal.getsignal(signal.SIGTERM)
        assert callable(before)

        def note(number: int, frame: Any) -> None:
            before(number, frame)
            came.append(number)

        signal.signal(signal.SIGTERM, note)
        os.kill(os.getppid(), signal.SIGTERM)
        deadline = time.monotonic() + 60
        while not came:
            assert time.monotonic() < deadline, "the parent did not pass it on"
            time.sleep(0.01)
        signal.signal(signal.SIGTERM, before)
        yield


@dataclass(frozen=True)
class SignalInStep:
    """A rank, or with None each, sends itself a signal some seconds after a step has begun. It comes within 5 steps."""

    rank: int | None
    step: int
    seconds: float
    name: str

    def install(self, patch: Patch) -> None:
        sender: subprocess.Popen[bytes] | None = None

        def send(step: int) -> None:
            nonlocal sender
            if step == self.step and self.rank in (None, dist.get_rank()):
                sender = signal_me([(self.seconds, self.name)])
            if sender is not None and step >= self.step + 5:
                sender.wait(60)

        around_steps(patch, send)


@dataclass(frozen=True)
class StopInStep:
    """Each rank gets SIGTERM when this step begins."""

    step: int

    def install(self, patch: Patch) -> None:
        def stop(step: int) -> None:
            if step == self.step:
                os.kill(os.getpid(), signal.SIGTERM)

        around_steps(patch, stop)


@dataclass(frozen=True)
class KilledBeside:
    """The process is killed right before or after it calls os.`name` for a path with `part` in it."""

    name: str
    part: str
    after: bool

    def install(self, patch: Patch) -> None:
        call = getattr(os, self.name)

        def call_and_die(*given: Any) -> None:
            path = os.readlink(f"/proc/self/fd/{given[0]}") if isinstance(given[0], int) else os.fspath(given[-1])
            hit = self.part in path
            if hit and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            call(*given)
            if hit:
                os.kill(os.getpid(), signal.SIGKILL)

        patch(os, self.name, call_and_die)


@dataclass(frozen=True)
class NanBatches:
    """The last of `ranks` has batches of NaN in these steps."""

    ranks: int
    steps: Collection[int]

    def install(self, patch: Patch) -> None:
        batch = Images.batch

        def spoil(data: Images, start: int, size: int, seed: int) -> Any:
            made = batch(data, start, size, seed)
            step, rank = divmod(start // size, self.ranks)
            if rank == self.ranks - 1 and step + 1 in self.steps:
                made.inputs.fill_(float("nan"))
            return made

        patch(Images, "batch", spoil)


@dataclass(frozen=True)
class LargeLosses:
    """Rank 1 multiplies its loss by 1e24 in these steps."""

    steps: Collection[int]

    def install(self, patch: Patch) -> None:
        count, loss, calls = Synchronizer.count, Learner._loss, 0

        def count_quietly(sync: Synchronizer, step: Step) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # in the tests' ranks a warning is an error
                count(sync, step)

        def enlarge(learner: Learner, *args: Any) -> Tensor:
            nonlocal calls
            calls += 1
            return loss(learner, *args) * (1e24 if dist.get_rank() == 1 and calls in self.steps else 1.0)

        patch(Synchronizer, "count", count_quietly)
        patch(Learner, "_loss", enlarge)


@dataclass(frozen=True)
class Hold:
    """Ranks wait before each of these steps until there is a file go-STEP, or a signal stops them."""

    steps: Collection[int]

    def install(self, patch: Patch) -> None:
        listen, factor, came = rank.on_signals, loop.schedule, list[int]()

        def note(handle: Callable[[int], None]) -> AbstractContextManager[None]:
            return listen(lambda number: (came.append(number), handle(number))[1])

        def wait(step: int, steps: int) -> float:
            deadline = time.monotonic() + 200
            while step + 1 in self.steps and not (came or Path(f"go-{step + 1}").exists()):
                assert time.monotonic() < deadline, f"nobody said go to step {step + 1}"
                time.sleep(0.01)
            return factor(step, steps)

        patch(rank, "on_signals", note)
        patch(loop, "schedule", wait)
