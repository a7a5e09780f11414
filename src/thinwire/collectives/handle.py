"""What `all_reduce_compressed` returns: a handle to wait for, and a report of what was done."""

import copy
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from torch.futures import Future


class Span(NamedTuple):
    """Seconds of `time.perf_counter`."""

    phase: str
    start: float
    stop: float


@dataclass
class Report:
    """What an operation did, on this rank; complete once its handle is."""

    algorithm: str
    """gather, sharded, dense or values; with "hierarchical, " before it if there were two stages."""
    reason: str
    """Why this algorithm."""
    segments: int = 1
    memory: int = 0
    """Bytes that were set aside beyond tensor and residuals."""
    bytes_sent: int = 0
    """Handed to the network by this rank, headers not counted; by the formula of a ring if torch's own did it."""
    bytes_received: int = 0
    bytes_between_nodes: int = 0
    """The part of `bytes_sent` that was sent in the stage between nodes; all of it if there is one stage."""
    messages: int = 0
    finite: bool = True
    """False if any rank's input was not finite: the result is NaN, and no residual has changed.

    Not looked at where torch's own all-reduce did it, for "none" without a residual.
    """
    spans: list[Span] = field(default_factory=list)
    """When it did what: encode, exchange, decode, and in training update. On an accelerator, all but exchange is the
    time to launch it."""

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        total: dict[str, float] = {}
        for phase, start, stop in self.spans:
            total[phase] = total.get(phase, 0.0) + stop - start
        return total

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(phase, started, time.perf_counter()))


class Handle:
    """An operation under way, as torch's own `Work`.

    The first result or error counts; what comes later, as after a mismatch, is dropped.
    """

    def __init__(self, report: Report, device: torch.device | None = None) -> None:
        """With a device, there is a future for who waits by torch's means."""
        self.report = report
        self.error: BaseException | None = None
        self.ended: float | None = None
        """When it was completed, by `time.perf_counter`."""
        self._done, self._lock = threading.Event(), threading.Lock()
        self._is_settled = False
        self._future: Future[list[Tensor]] | None = None
        if device is not None:
            self._future = Future(devices=[device] if device.type == "cuda" else None)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Until the result is in the tensor: then True, or the error. Work queued on the current stream comes after.

        timeout    seconds to wait here; the operation goes on if they pass, and `wait` may be called again.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self._done.wait(seconds):  # Ctrl-C gets through, which it would not while torch waits
            raise TimeoutError(f"the all-reduce is not done after {timeout}; it goes on")
        if self.error is not None:
            raise self.error
        if self._future is not None:
            self._future.wait()
        return True

    def wait_quietly(self) -> None:
        """Until it is over, well or not."""
        self._done.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def get_future(self) -> "Future[list[Tensor]]":
        """A future of [tensor]."""
        assert self._future is not None
        return self._future

    def complete(self, result: list[Tensor]) -> None:
        """The result is there, or on a GPU queued on the current stream."""
        if self._is_first():
            if self._future is not None:
                self._future.set_result(result)
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """The error without its frames: the future would keep them, and their tensors, for ever."""
        if self._is_first():
            if error.__traceback__ is not None:
                error.add_note("In a thread of thinwire:\n" + "".join(traceback.format_tb(error.__traceback__)))
            self.error = _without_frames(error)
            if self._future is not None:
                self._future.set_exception(copied(self.error))  # type: ignore[arg-type]
            self._done.set()

    def _is_first(self) -> bool:
        with self._lock:
            first, self._is_settled = not self._is_settled, True
            if first:
                self.ended = time.perf_counter()
            return first


def _without_frames(error: BaseException) -> BaseException:
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def copied(error: BaseException) -> BaseException:
    """An error of the same kind, to be raised elsewhere too."""
    try:
        return copy.copy(error)
    except Exception:  # one that cannot be made from its arguments
        return RuntimeError(repr(error))
