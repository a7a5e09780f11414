"""The one thread that sends and receives for a group.

It takes reductions in the order in which they come. What the first of them sends is posted, then what the others send
that have come meanwhile, and only then it waits, for the first: so a link that answers late is waited for once, not
once for each. It waits for nothing while it holds a lock that a caller needs, and knows nothing of optimizers.
"""

import queue
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from ..plan import AT_ONCE


class Carried(Protocol):
    """What goes over the wire: a `Reduction`."""

    encoded: bool
    """Whether its payload is there; if not, `post` makes it, which takes memory."""

    @property
    def meets(self) -> bool:
        """Whether it waits for other ranks before its first byte."""

    @property
    def has_two_rounds(self) -> bool:
        """Whether it exchanges twice at most, and its second round may wait for the first ones of others.

        Ranks need not have the same reductions under way. One that waits for the first round of a later reduction has
        posted its second round of this one; a third it would not have, and ranks would wait for each other in a circle.
        """

    def post(self) -> bool:
        """Begin to send and receive; False if nothing is left to do."""

    def collect(self) -> bool:
        """Wait for what was posted and post what follows from it; False if nothing is left to do."""


class Wire:
    """ordered: one reduction after the other, from its first byte to its last, as NCCL needs it."""

    def __init__(self, *, ordered: bool = False) -> None:
        self._ordered = ordered
        self._waiting: queue.SimpleQueue[Carried] = queue.SimpleQueue()
        # An executor, since Python waits for its threads when the program ends.
        self._thread = ThreadPoolExecutor(1, "thinwire-wire")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._works = self._closed = False
        """Whether the thread will look for what is waiting; whether nothing new may begin."""

    def submit(self, reduction: Carried) -> None:
        """RuntimeError if it is closed, or the program ends: then the reduction does not begin."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the group is no more")
            if not self._works:
                self._thread.submit(self._work)
                self._works = True
            self._waiting.put(reduction)

    def close(self) -> None:
        """What is under way may end; nothing new begins."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=False)

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream on which this thread works, for tensors of a GPU."""
        if device.type != "cuda":
            return None
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            return self._streams[device]

    def _work(self) -> None:
        """Carry all that has come."""
        under_way: deque[Carried] = deque()
        next_one: Carried | None = None
        while True:
            if next_one is None:
                next_one = self._next()
            if next_one is not None and self._may_post(next_one, len(under_way)):
                if next_one.post():
                    under_way.append(next_one)
                next_one = None
            elif under_way:
                oldest = under_way.popleft()
                if oldest.collect():
                    (under_way.append if oldest.has_two_rounds else under_way.appendleft)(oldest)
            elif next_one is None and self._ends():
                return

    def _next(self) -> Carried | None:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            return None

    def _ends(self) -> bool:
        """Whether nothing is waiting; then who submits next starts the work anew."""
        with self._lock:
            self._works = not self._waiting.empty()
            return not self._works

    def _may_post(self, reduction: Carried, under_way: int) -> bool:
        """Who meets the other ranks does so alone: they may be waiting for what is under way here."""
        if not under_way:
            return True
        if self._ordered or reduction.meets:
            return False
        return reduction.encoded or under_way < AT_ONCE
