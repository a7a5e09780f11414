"""Threads that wait for each other and, if they take turns, run one at a time.

Ranks that are threads lose most of their time to Python's interpreter lock, which they pass on every few milliseconds.
With turns, one rank runs until it has to wait, then the next one that is ready, in the same order in every run.
"""

import threading
from collections.abc import Callable


class _Waiter:
    def __init__(self, rank: int, ready: Callable[[], bool]) -> None:
        self.rank, self.ready = rank, ready
        self.woken = threading.Event()


class Turns:
    """Lets the threads of `size` ranks wait. A rank takes turns between `enter` and `leave`; others run when ready."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._taking_turns: set[int] = set()
        self._turn: int | None = None

    def enter(self, rank: int) -> None:
        with self._lock:
            self._taking_turns.add(rank)
        self.wait(rank, lambda: True, None)

    def leave(self, rank: int) -> None:
        with self._lock:
            self._taking_turns.discard(rank)
            self._hand_on(rank)

    def wait(self, rank: int, ready: Callable[[], bool], timeout: float | None) -> None:
        """Wait until `ready()` is true and it is this rank's turn, or until the timeout. Other ranks run meanwhile."""
        waiter = _Waiter(rank, ready)
        with self._lock:
            self._waiters.append(waiter)
            self._hand_on(rank)
        waiter.woken.wait(timeout)
        with self._lock:
            if waiter in self._waiters:  # timed out; this rank continues out of turn
                self._waiters.remove(waiter)

    def changed(self) -> None:
        """Wake the ranks that are ready now. A rank that takes turns is woken only if no other rank has the turn."""
        with self._lock:
            self._hand_on(None)

    def _hand_on(self, rank: int | None) -> None:
        """End the turn of `rank`. Wake the next ready rank, and all that take no turns. The caller has the lock."""
        if self._turn == rank or self._turn not in self._taking_turns:
            self._turn = None
        first = 0 if rank is None else rank + 1
        for waiter in sorted(self._waiters, key=lambda waiter: (waiter.rank - first) % self._size):
            takes_turns = waiter.rank in self._taking_turns
            if (self._turn is None or not takes_turns) and waiter.ready():
                self._waiters.remove(waiter)
                self._turn = waiter.rank if takes_turns else self._turn
                waiter.woken.set()
