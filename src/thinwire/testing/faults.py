"""Faults as objects: what goes wrong, on which rank, at which step. `inject` lets them happen.

A fault that could not happen in its block is an error. Otherwise a test of it would pass whatever the code does.
"""

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from ..collectives.groups import Group, place
from ..collectives.local import LocalGroup


class InjectedError(RuntimeError):
    """The error of a `RaiseError` that was not given another one."""


@dataclass(frozen=True)
class Fault(ABC):
    """Something that goes wrong on `rank` at `step`. Derive from it for faults of your own."""

    rank: int
    step: int

    @abstractmethod
    def strike(self, group: Group, parameters: list[Tensor]) -> AbstractContextManager[object]:
        """Return a context in which the fault happens. `inject` enters it on the fault's rank, at its step."""


@contextmanager
def inject(
    faults: Iterable[Fault], step: int, *, group: Group = None, parameters: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Let those of the faults happen that are for this rank and this step, inside of the `with` block.

    faults       of all ranks and steps; the same list can be given everywhere.
    step         number of this step.
    group        the group whose rank counts, as for `all_reduce_compressed`.
    parameters   tensors whose gradients `NotFinite` changes.

    >>> import thinwire
    >>> group = thinwire.LocalWorld(1).groups[0]  # one rank, in this thread
    >>> for step in range(3):
    ...     with inject([RaiseError(rank=0, step=2)], step, group=group):
    ...         pass
    Traceback (most recent call last):
    ...
    thinwire.testing.faults.InjectedError: injected on rank 0 at step 2
    """
    rank, _ = place(group)
    given = list(parameters)
    with ExitStack() as stack:
        for fault in faults:
            if (fault.rank, fault.step) == (rank, step):
                stack.enter_context(fault.strike(group, given))
        yield


@dataclass(frozen=True)
class RaiseError(Fault):
    """The rank raises `error`, in place of what is in the block."""

    error: Exception | None = None

    def strike(self, group: Group, parameters: list[Tensor]) -> NoReturn:
        raise self.error or InjectedError(f"injected on rank {self.rank} at step {self.step}")


@dataclass(frozen=True)
class Kill(Fault):
    """The process of the rank is killed by SIGKILL, as by a machine that is switched off."""

    def strike(self, group: Group, parameters: list[Tensor]) -> NoReturn:
        if isinstance(group, LocalGroup):
            raise ValueError(f"{self} would kill the test, because its ranks are threads: use a RankPool")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL ends this process at once")


@dataclass(frozen=True)
class Stop(Fault):
    """The rank stands still for some seconds and goes on: a process with all its threads, or a thread."""

    seconds: float = 1.0

    def strike(self, group: Group, parameters: list[Tensor]) -> AbstractContextManager[None]:
        """Stop this process by SIGSTOP until another process continues it, or let this thread sleep."""
        if isinstance(group, LocalGroup):
            time.sleep(self.seconds)
        else:
            other = subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            other.wait()
        return nullcontext()


@dataclass(frozen=True)
class NotFinite(Fault):
    """One element of one gradient becomes NaN or infinite, when the backward pass in the block computes it.

    value       the element's new value.
    parameter   number of the parameter, in the order of `parameters`.
    element     number of the element in the flattened gradient.
    """

    value: float = float("nan")
    parameter: int = 0
    element: int = 0

    @contextmanager
    def strike(self, group: Group, parameters: list[Tensor]) -> Iterator[None]:
        if self.parameter >= len(parameters):
            raise ValueError(f"{self}, but inject() was given {len(parameters)} parameters: give more in parameters=")
        spoilt: list[Tensor] = []

        def spoil(grad: Tensor) -> Tensor:
            spoilt.append(grad.clone())
            spoilt[-1].view(-1)[self.element] = self.value
            return spoilt[-1]

        hook = parameters[self.parameter].register_hook(spoil)
        try:
            yield
        finally:
            hook.remove()
        if not spoilt:
            raise ValueError(f"{self} did not happen: the backward pass must be in the block of inject()")
