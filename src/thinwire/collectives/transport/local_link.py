"""Ranks that are threads of one process: they wait for each other, and copy messages from buffer to buffer.

Each rank posts its send buffers and its receive buffers. Of two ranks with messages for each other, the later one
copies them, all in one call: if each copied its own in its wait, ranks that wait for different messages could wait for
each other. A buffer is free again after the wait for its post, as with gloo.

On CUDA, no thread waits for the device. Ranks on different streams record an event with their post. The stream of the
rank that copies waits for this event, and the other rank's stream waits for an event after the copies.

Threads lose most of their time to Python's interpreter lock, which they pass on every few milliseconds. If they take
turns, one rank runs until it has to wait, then the next one that is ready, in the same order in every run.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .link import Buffers, Link, LinkBroken, Seen, Wait


class _Waiter(NamedTuple):
    rank: int
    ready: Callable[[], bool]
    woken: threading.Event


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
        waiter = _Waiter(rank, ready, threading.Event())
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


@dataclass
class Post:
    """The buffers that one rank sends and receives under one tag."""

    sends: dict[int, Tensor]
    receives: dict[int, Tensor]
    stream: torch.cuda.Stream | None
    filled: torch.cuda.Event | None  # after the last write to `sends` and the last read of `receives`
    waits_for: set[int]  # peers whose messages to or from this rank have not been copied yet
    copied: list[torch.cuda.Event] = field(default_factory=list)
    """Events on the streams of other ranks, after their copies from and to this rank's buffers."""
    fault: LinkBroken | None = None


class Switchboard:
    """The posts of all ranks, shared by the links of one connection. If one rank closes it, it is closed for all."""

    def __init__(self, size: int, turns: Turns | None = None) -> None:
        self.size = size
        self.turns = turns or Turns(size)
        self.closed_by: int | None = None
        self._lock = threading.Lock()
        self._posts: dict[tuple[int, int], Post] = {}  # by (tag, rank)

    def close(self, rank: int) -> None:
        with self._lock:
            if self.closed_by is None:
                self.closed_by = rank
            self._posts.clear()
        self.turns.changed()

    def post(self, rank: int, tag: int, post: Post) -> None:
        """Add a post, and copy all messages between this rank and the ranks that have posted before it."""
        with self._lock:
            if self.closed_by is not None:
                return
            pairs: list[tuple[Tensor, Tensor]] = []
            for peer in sorted(post.waits_for, key=lambda peer: (peer - rank) % self.size):
                theirs = self._posts.get((tag, peer))
                if theirs is None or rank not in theirs.waits_for:
                    continue
                there = _pair(post.sends.get(peer), theirs.receives.get(rank), theirs, rank)
                here = _pair(theirs.sends.get(rank), post.receives.get(peer), post, peer)
                if there is not None and here is not None:
                    pairs += there + here
                    _order(post, theirs)
                    post.waits_for.discard(peer)
                    theirs.waits_for.discard(rank)
            if pairs:
                torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])
                if post.filled is not None:
                    post.filled.record(post.stream)
            self._posts[tag, rank] = post
        self.turns.changed()

    def remove(self, rank: int, tag: int) -> None:
        with self._lock:
            self._posts.pop((tag, rank), None)


class LocalLink(Link):
    """The link of one rank to a switchboard."""

    def __init__(self, board: Switchboard, rank: int) -> None:
        super().__init__(rank, board.size)
        self._board = board

    def post(self, sends: Buffers, receives: Buffers, tag: int) -> Wait:
        out = {peer: buffer for peer, buffer in sends.items() if buffer.numel()}
        into = {peer: buffer for peer, buffer in receives.items() if buffer.numel()}
        stream = filled = None
        device = next(iter([*out.values(), *into.values()])).device
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            filled = torch.cuda.Event()
            filled.record(stream)
        post, board = Post(out, into, stream, filled, waits_for={*out, *into}), self._board
        board.post(self.rank, tag, post)

        def ready() -> bool:
            return not post.waits_for or post.fault is not None or board.closed_by is not None

        def first_peer() -> int:
            return min(post.waits_for, key=lambda peer: (peer - self.rank) % self.size)

        def wait(deadline: float, waits_for: Callable[[int], None]) -> Seen:
            if post.waits_for:
                waits_for(first_peer())
                board.turns.wait(self.rank, ready, max(0.0, deadline - time.monotonic()))
            if post.waits_for:
                if post.fault is None and board.closed_by is not None:
                    raise LinkBroken(first_peer(), False, f"rank {board.closed_by} closed the connection")
                raise post.fault or LinkBroken(first_peer(), True, "no message in time")
            board.remove(self.rank, tag)
            for copied in post.copied:
                copied.wait(post.stream)
            return Seen(sends, receives)

        return wait

    def close(self) -> None:
        self._board.close(self.rank)

    def check(self) -> None:
        if self._board.closed_by is not None:
            raise LinkBroken(self._board.closed_by, False, f"rank {self._board.closed_by} closed the connection")


def _pair(
    source: Tensor | None, target: Tensor | None, receiver: Post, sender: int
) -> list[tuple[Tensor, Tensor]] | None:
    """Return what to copy for one message, if any; None if it does not fit, which is an error of the receiver."""
    if source is None or target is None:
        return [] if source is target else None
    if source.numel() != target.numel():
        receiver.fault = LinkBroken(sender, False, f"{source.numel()} bytes came, expected {target.numel()}")
        return None
    return [(source, target)]


def _order(post: Post, theirs: Post) -> None:
    """Order this rank's copies after the work that the other rank has queued, and before its later work."""
    if post.filled is not None and theirs.filled is not None and theirs.stream != post.stream:
        theirs.filled.wait(post.stream)
        theirs.copied.append(post.filled)  # recorded again after the copies, before the other rank continues
