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


class Promise:
    """A result to come. The first result or error counts; what comes later, as after a mismatch, is dropped."""

    def __init__(self, device: torch.device) -> None:
        self.future: Future[list[Tensor]] = Future(devices=[device] if device.type == "cuda" else None)
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.ended: float | None = None
        """By `time.perf_counter`."""
        self._lock = threading.Lock()
        self._settled = False

    def keep(self, result: list[Tensor]) -> None:
        if self._is_first():
            self.future.set_result(result)
            self.done.set()

    def fail(self, error: BaseException) -> None:
        """Frames are replaced by text, and the future gets a copy: torch hides what a future refers to from Python's
        collector, so an error with the frames that refer to the future would keep it, and the tensors, for ever."""
        if self._is_first():
            if error.__traceback__ is not None:
                error.add_note("In a thread of thinwire:\n" + "".join(traceback.format_tb(error.__traceback__)))
            self.error = error
            self.future.set_exception(copied(_without_frames(error)))  # type: ignore[arg-type]
            self.done.set()

    def _is_first(self) -> bool:
        with self._lock:
            first, self._settled = not self._settled, True
            if first:
                self.ended = time.perf_counter()
            return first


class Handle:
    """An operation under way, as torch's own `Work`."""

    def __init__(self, promise: Promise, report: Report) -> None:
        self._promise, self.report = promise, report

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Until the result is in the tensor: then True, or the error. Work queued on the current stream comes after.

        timeout    seconds to wait here; the operation goes on if they pass, and `wait` may be called again.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self._promise.done.wait(seconds):  # Ctrl-C gets through, which it would not while torch waits
            raise TimeoutError(f"the all-reduce is not done after {timeout}; it goes on")
        if self._promise.error is not None:
            raise self._promise.error
        self._promise.future.wait()
        return True

    def is_completed(self) -> bool:
        return self._promise.done.is_set()

    @property
    def ended(self) -> float | None:
        """When it was completed, by `time.perf_counter`."""
        return self._promise.ended

    def get_future(self) -> "Future[list[Tensor]]":
        """A future of [tensor]."""
        return self._promise.future


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
