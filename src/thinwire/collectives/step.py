"""A step: operations that count together, as all buckets of one gradient do.

An overflow shows in one bucket, but it is the step that is skipped. So no residual may change before the last exchange
of the step has said that everything is finite, on every rank: operations leave what they got with the step, and the
last one settles all of them. What is held meanwhile are payloads, a small part of the tensors.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

from .handle import copied


class Received(NamedTuple):
    """An operation after its exchange, on which nothing depends yet."""

    finite: bool
    """The same on all ranks."""
    settle: Callable[[bool], None]
    """Take the result if all is finite, or leave everything as it was and make the result NaN."""
    fail: Callable[[BaseException], None]


class Step:
    """Opened by the first operation, closed after the last has been issued, settled when all have been exchanged."""

    def __init__(self) -> None:
        self.finite: bool | None = None
        """Whether the step counts; None until it is settled."""
        self._lock = threading.Lock()
        self._received: list[Received] = []
        self._under_way, self._closed, self._settled = 0, False, False
        self._error: BaseException | None = None

    def join(self) -> None:
        """An operation is issued. If another one failed, its error: this one would wait for ranks that have left."""
        with self._lock:
            if self._error is not None:
                raise copied(self._error) from self._error
            assert not self._closed
            self._under_way += 1

    def deposit(self, received: Received) -> None:
        """An operation has been exchanged."""
        with self._lock:
            self._received.append(received)
            self._under_way -= 1
        self._settle_if_complete()

    def fail(self, error: BaseException) -> None:
        """An operation has failed: none of the others takes effect."""
        with self._lock:
            self._error = self._error or error
            self._under_way -= 1
        self._settle_if_complete()

    def close(self) -> None:
        """No more operations join."""
        with self._lock:
            self._closed = True
        self._settle_if_complete()

    def abandon(self, reason: str) -> bool:
        """The step will not be finished, as after an error in the middle of a backward pass. False: it will be."""
        with self._lock:
            if self._closed:
                return False
            self._error = self._error or RuntimeError(reason)
        self.close()
        return True

    def _settle_if_complete(self) -> None:
        with self._lock:
            if self._settled or not self._closed or self._under_way:
                return
            self._settled = True
            received, self._received = self._received, []
            finite = all(part.finite for part in received)
            self.finite = finite if self._error is None else None
        for part in received:
            if self._error is None:
                part.settle(finite)
            else:
                part.fail(copied(self._error))
