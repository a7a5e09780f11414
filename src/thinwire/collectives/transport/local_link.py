"""Messages between threads of one process: copied straight from the sender's buffer into the receiver's.

Each rank posts what it sends and where it wants what it receives. Of two ranks that have messages for each other, the
one that comes later copies them, all in one call; then both go on. So nothing is copied twice, and a buffer is free
again when what `post` returns has waited, as with gloo.

On CUDA nobody waits for the device. Ranks on one stream need nothing more, since what is queued first runs first. Ranks
on streams of their own leave an event with what they post; who copies waits for it, and leaves one for them.
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
    """What one rank sends and receives under one tag."""

    sends: dict[int, Tensor]
    receives: dict[int, Tensor]
    stream: torch.cuda.Stream | None
    filled: torch.cuda.Event | None
    """Recorded behind what wrote the buffers that are sent, and behind what last read those that are received."""
    waits_for: set[int] = field(default_factory=set)
    """Peers whose messages have not been copied to this rank, or from it."""
    copied: list[torch.cuda.Event] = field(default_factory=list)
    """Recorded on other ranks' streams behind their copies from and to this rank's buffers."""
    fault: LinkBroken | None = None


class Switchboard:
    """The posts of all ranks, which the links of one connection share. If one of them closes it, it is closed for all.

    turns   who may run; by default everybody.
    """

    def __init__(self, size: int, turns: Turns | None = None) -> None:
        self.size = size
        self.turns = turns or Turns(size)
        self.closed_by: int | None = None
        self._lock = threading.Lock()
        self._posts: dict[tuple[int, int], Post] = {}
        """By tag and rank."""

    def close(self, rank: int) -> None:
        """End all that is under way."""
        with self._lock:
            if self.closed_by is None:
                self.closed_by = rank
            self._posts.clear()
        self.turns.changed()

    def post(self, rank: int, tag: int, post: Post) -> None:
        """Copy all messages between this rank and those that have posted before it."""
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

    def take(self, rank: int, tag: int) -> None:
        """Forget what was posted."""
        with self._lock:
            self._posts.pop((tag, rank), None)


class LocalLink(Link):
    """One rank's end of a switchboard."""

    def __init__(self, board: Switchboard, rank: int) -> None:
        super().__init__(rank, board.size)
        self._board = board

    def post(self, sends: Buffers, receives: Buffers, tag: int) -> Wait:
        post = _post(sends, receives)
        self._board.post(self.rank, tag, post)

        def wait(deadline: float, waits_for: Callable[[int], None]) -> Seen:
            if post.waits_for:
                waits_for(min(post.waits_for, key=lambda peer: (peer - self.rank) % self.size))
                self._wait(post, deadline)
            self._board.take(self.rank, tag)
            for copied in post.copied:
                copied.wait(post.stream)
            return Seen(sends, receives)

        return wait

    def close(self) -> None:
        self._board.close(self.rank)

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


def _post(sends: Buffers, receives: Buffers) -> Post:
    out = {peer: buffer for peer, buffer in sends.items() if buffer.numel()}
    into = {peer: buffer for peer, buffer in receives.items() if buffer.numel()}
    stream = filled = None
    device = next(iter([*out.values(), *into.values()])).device
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        filled = torch.cuda.Event()
        filled.record(stream)
    return Post(out, into, stream, filled, {*out, *into})


def _fits(source: Tensor | None, target: Tensor | None, receiver: Post, sender: int) -> bool:
    """Tell whether a message has the length that its receiver expects; if not, the receiver gets an error."""
    if source is None and target is None:
        return True
    if source is not None and target is not None and source.numel() == target.numel():
        return True
    if target is not None and source is not None:
        receiver.fault = LinkBroken(sender, False, f"{source.numel()} bytes came, expected {target.numel()}")
    return False


def _order(post: Post, theirs: Post) -> None:
    """Let this rank's copies come after what the other has queued, and what the other queues next after the copies."""
    if post.filled is not None and theirs.filled is not None and theirs.stream != post.stream:
        theirs.filled.wait(post.stream)
        theirs.copied.append(post.filled)  # it is recorded anew behind the copies, before the other goes on
