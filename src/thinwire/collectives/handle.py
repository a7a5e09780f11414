"""The return value of `all_reduce_compressed`: a handle to wait on, with a report of the operation."""

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
    """Start and end of one phase, in seconds of `time.perf_counter`."""

    phase: str
    start: float
    stop: float


@dataclass
class Report:
    """The report of one operation on this rank. Its counts are final when the handle is completed."""

    algorithm: str  # gather, sharded, dense or values, with "hierarchical, " in front if there were two stages
    reason: str
    segments: int = 1
    memory: int = 0  # planned bytes, beyond the tensor and the residuals
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_between_nodes: int = 0  # part of `bytes_sent`; with one stage, all of it
    messages: int = 0
    finite: bool = True  # False if the input of any rank was not: the result is NaN, and no residual has changed
    spans: list[Span] = field(default_factory=list)
    """Times of encode, exchange, decode and update; on an accelerator mostly those to launch the kernels."""

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(phase, started, time.perf_counter()))


class Handle:
    """A running all-reduce, with the methods of torch's `Work`. Only the first result or error counts."""

    def __init__(self, report: Report, device: torch.device | None = None) -> None:
        self.report = report
        self.error: BaseException | None = None
        self.ended: float | None = None  # of `time.perf_counter`
        self._done, self._lock = threading.Event(), threading.Lock()
        self._future: Future[list[Tensor]] | None = None
        if device is not None:
            self._future = Future(devices=[device] if device.type == "cuda" else None)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the result is in the tensor. Return True, or raise the error of the operation.

        On a GPU, the current stream waits for the result. After a `TimeoutError`, the operation continues.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self._done.wait(seconds):  # can be interrupted by Ctrl-C, unlike a wait in torch
            raise TimeoutError(f"the all-reduce has not ended after {timeout}; it continues")
        if self.error is not None:
            raise self.error
        if self._future is not None:
            self._future.wait()
        return True

    def wait_quietly(self) -> None:
        self._done.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def get_future(self) -> "Future[list[Tensor]]":
        assert self._future is not None
        return self._future

    def complete(self, result: list[Tensor]) -> None:
        """End the operation with a result. On a GPU, the result is queued on the current stream."""
        if self._is_first():
            if self._future is not None:
                self._future.set_result(result)
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """End the operation with an error. Remove its frames, because the future would keep their tensors alive."""
        if self._is_first():
            if error.__traceback__ is not None:
                error.add_note("In a thread of thinwire:\n" + "".join(traceback.format_tb(error.__traceback__)))
            self.error = error
            link: BaseException | None = error
            while link is not None:
                link.__traceback__ = None
                link = link.__cause__ or link.__context__
            if self._future is not None:
                self._future.set_exception(copied(error))  # type: ignore[arg-type]
            self._done.set()

    def _is_first(self) -> bool:
        with self._lock:
            if self.ended is not None:
                return False
            self.ended = time.perf_counter()
            return True


def copied(error: BaseException) -> BaseException:
    """Return a copy of an error, to be raised in a second place."""
    try:
        return copy.copy(error)
    except Exception:  # this error cannot be copied
        return RuntimeError(repr(error))
