"""Messages between threads of one process, copied directly from the sender's buffer to the receiver's.

Each rank posts its send buffers and its receive buffers. Of two ranks with messages for each other, the later one
copies them, all in one call. A buffer is free again after the wait for its post, as with gloo.

On CUDA, no thread waits for the device. Ranks on different streams record an event with their post. The stream of the
rank that copies waits for this event, and the other rank's stream waits for an event after the copies.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .link import Buffers, Link, LinkBroken, Seen, Wait
from .turns import Turns


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
            sources, targets = [], []
            for peer in sorted(post.waits_for, key=lambda peer: (peer - rank) % self.size):
                theirs = self._posts.get((tag, peer))
                if theirs is None or rank not in theirs.waits_for:
                    continue
                mine = [(post.sends.get(peer), theirs.receives.get(rank), theirs, rank)]
                mine += [(theirs.sends.get(rank), post.receives.get(peer), post, peer)]
                if all(_fits(*message) for message in mine):
                    sources += [source for source, target, _, _ in mine if source is not None and target is not None]
                    targets += [target for source, target, _, _ in mine if source is not None and target is not None]
                    _order(post, theirs)
                    post.waits_for.discard(peer)
                    theirs.waits_for.discard(rank)
            if targets:
                torch._foreach_copy_(targets, sources)
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
        post = Post(sends=out, receives=into, stream=stream, filled=filled, waits_for={*out, *into})
        self._board.post(self.rank, tag, post)

        def wait(deadline: float, waits_for: Callable[[int], None]) -> Seen:
            if post.waits_for:
                waits_for(min(post.waits_for, key=lambda peer: (peer - self.rank) % self.size))
                self._wait(post, deadline)
            self._board.remove(self.rank, tag)
            for copied in post.copied:
                copied.wait(post.stream)
            return Seen(sends, receives)

        return wait

    def close(self) -> None:
        self._board.close(self.rank)

    def check(self) -> None:
        if self._board.closed_by is not None:
            raise LinkBroken(self._board.closed_by, False, f"rank {self._board.closed_by} closed the connection")

    def _wait(self, post: Post, deadline: float) -> None:
        board = self._board

        def ready() -> bool:
            return not post.waits_for or post.fault is not None or board.closed_by is not None

        board.turns.wait(self.rank, ready, max(0.0, deadline - time.monotonic()))
        if not post.waits_for:
            return
        if post.fault is not None:
            raise post.fault
        peer = min(post.waits_for, key=lambda peer: (peer - self.rank) % self.size)
        if board.closed_by is not None:
            raise LinkBroken(peer, False, f"rank {board.closed_by} closed the connection")
        raise LinkBroken(peer, True, "no message in time")


def _fits(source: Tensor | None, target: Tensor | None, receiver: Post, sender: int) -> bool:
    """Return whether a message has the length that its receiver expects. If not, set the receiver's error."""
    if source is None or target is None:
        return source is target
    if source.numel() != target.numel():
        receiver.fault = LinkBroken(sender, False, f"{source.numel()} bytes came, expected {target.numel()}")
    return source.numel() == target.numel()


def _order(post: Post, theirs: Post) -> None:
    """Order this rank's copies after the work that the other rank has queued, and before its later work."""
    if post.filled is not None and theirs.filled is not None and theirs.stream != post.stream:
        theirs.filled.wait(post.stream)
        theirs.copied.append(post.filled)  # recorded again after the copies, before the other rank continues
