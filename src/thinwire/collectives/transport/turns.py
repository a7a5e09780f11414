"""Threads that wait for each other, and, if they take turns, run one at a time.

Threads that all want Python's interpreter lock hand it over every few milliseconds, in any order. Ranks that are
threads of one process mostly wait for each other, so they lose most of their time that way. Where they take turns, one
rank runs until it has to wait; then the next one that can go on does. The order is the same in every run.
"""

import threading
from collections.abc import Callable


class _Waiter:
    def __init__(self, rank: int, ready: Callable[[], bool]) -> None:
        self.rank, self.ready = rank, ready
        self.woken = threading.Event()


class Turns:
    """Lets the threads of `size` ranks wait until something holds.

    A rank takes turns from `enter` to `leave`; those that never enter run whenever they are ready.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._taking_turns: set[int] = set()
        self._turn: int | None = None
        """The one rank that runs, of those that take turns."""

    def enter(self, rank: int) -> None:
        """Take turns from now on, and wait for the first one."""
        with self._lock:
            self._taking_turns.add(rank)
        self.wait(rank, lambda: True, None)

    def leave(self, rank: int) -> None:
        """Take no more turns."""
        with self._lock:
            self._taking_turns.discard(rank)
            self._hand_on(rank)

    def wait(self, rank: int, ready: Callable[[], bool], timeout: float | None) -> None:
        """Let others run until `ready` holds and it is this rank's turn, or the time is over."""
        waiter = _Waiter(rank, ready)
        with self._lock:
            self._waiters.append(waiter)
            self._hand_on(rank)
        waiter.woken.wait(timeout)
        with self._lock:
            if waiter in self._waiters:  # the time is over; it goes on out of turn
                self._waiters.remove(waiter)

    def changed(self) -> None:
        """Wake those who are ready now, if it is nobody's turn."""
        with self._lock:
            self._hand_on(None)

    def _hand_on(self, rank: int | None) -> None:
        """Wake the next rank that is ready, and whoever takes no turns. The lock is held."""
        if self._turn == rank or self._turn not in self._taking_turns:
            self._turn = None
        first = 0 if rank is None else rank + 1
        for waiter in sorted(self._waiters, key=lambda waiter: (waiter.rank - first) % self._size):
            takes_turns = waiter.rank in self._taking_turns
            if (self._turn is None or not takes_turns) and waiter.ready():
                self._waiters.remove(waiter)
                self._turn = waiter.rank if takes_turns else self._turn
                waiter.woken.set()
