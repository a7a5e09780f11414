"""The thread that sends and receives for a group.

It posts the flight that was submitted first, then all others that have been submitted meanwhile, and only then waits
for the first. So the latency of the network is paid once, not once for each flight.
"""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

AT_ONCE = 4  # operations of one group that are under way at a time and not encoded yet, which bounds the memory


class WireTask(Protocol):
    """The part of a `Flight` that the wire uses.

    Ranks would wait in a circle for a third exchange, which a rank that waits for a later flight has not posted. So
    other flights may be posted in between only if this one has two.
    """

    encoded: bool
    has_two_rounds: bool

    @property
    def waits_for_all(self) -> bool:
        """Return whether this waits for all ranks before its first byte."""

    def post(self) -> bool:
        """Start to send and receive. Return False if nothing is left to do."""

    def collect(self) -> bool:
        """Wait for the posted exchange and post the next one. Return False if nothing is left to do."""


class Wire:
    """The thread of one group; or of all NCCL groups, `ordered`: one flight after the other, as NCCL needs it."""

    def __init__(self, *, ordered: bool = False) -> None:
        self._ordered = ordered
        self._waiting: deque[WireTask] = deque()
        # An executor, because Python waits for its threads when the program ends.
        self._thread = ThreadPoolExecutor(1, "thinwire-wire")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._works = self._closed = False
        """`_works`: the thread will look at the queue. `_closed`: new flights are refused."""

    def submit(self, flight: WireTask) -> None:
        """Add a flight to the queue. Raise RuntimeError if the wire is closed or the program ends."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the process group was destroyed")
            if not self._works:
                self._thread.submit(self._work)
                self._works = True
            self._waiting.append(flight)

    def close(self) -> None:
        """Refuse new flights. Those already submitted may finish."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=False)

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            return self._streams[device]

    def _work(self) -> None:
        under_way: deque[WireTask] = deque()
        while True:
            if self._waiting and self._may_post(self._waiting[0], len(under_way)):
                under_way.append(self._waiting.popleft())
                if not under_way[-1].post():
                    under_way.pop()
            elif under_way:
                oldest = under_way.popleft()
                if oldest.collect():
                    (under_way.append if oldest.has_two_rounds else under_way.appendleft)(oldest)
            else:
                with self._lock:
                    if not self._waiting:
                        self._works = False  # the next `submit` starts the work again
                        return

    def _may_post(self, flight: WireTask, under_way: int) -> bool:
        """Return whether a flight may be posted now: alone, if its other ranks may wait for one under way here."""
        if not under_way:
            return True
        if self._ordered or flight.waits_for_all:
            return False
        return flight.encoded or under_way < AT_ONCE
