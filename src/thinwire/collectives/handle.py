"""What `all_reduce_compressed` returns: a handle to wait for, and a report of what was done."""

import threading
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch.futures import Future

_SETTLE = threading.RLock()  # a callback may settle another future


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
    """False if any rank's input was not finite: the result is NaN, and no residual has changed."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of encode, exchange and decode. On an accelerator, encode and decode are the time to launch them."""


class Handle:
    """An operation under way, as torch's own `Work`."""

    def __init__(self, future: "Future[list[Tensor]]", report: Report) -> None:
        self._future, self.report = future, report
        self._done = threading.Event()
        future.add_done_callback(lambda _: self._done.set())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the result is in the tensor: then True, or the error. Work queued on the current stream comes after.

        timeout    how long to wait here; the operation goes on if it passes, and `wait` may be called again.
        """
        # Ctrl-C gets through, which it would not while torch waits.
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError(f"the all-reduce is not done after {timeout}; it goes on")
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def get_future(self) -> "Future[list[Tensor]]":
        """A future of [tensor]."""
        return self._future


def new_future(device: torch.device) -> "Future[list[Tensor]]":
    return Future(devices=[device] if device.type == "cuda" else None)


def settle(future: "Future[list[Tensor]]", result: list[Tensor] | BaseException) -> None:
    """The first result or error counts; what comes later, as after a mismatch, is dropped."""
    with _SETTLE:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)  # type: ignore[arg-type]
        else:
            future.set_result(result)
