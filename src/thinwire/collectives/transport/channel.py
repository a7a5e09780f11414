"""This rank's end of a group: it numbers the operations, and keeps the connections that they share."""

import itertools
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from .board import Board
from .errors import CollectiveError, MismatchError, PeerError
from .link import GlooLink, Link, NcclLink
from .wire import Wire

_CONNECT_SECONDS = 60.0
_KINDS = {kind.__name__: kind for kind in (CollectiveError, MismatchError, PeerError)}


class Channel(ABC):
    """One group, for tensors that one backend carries. Who carries its bytes is for subclasses to say."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        backend: str,
        rank: int,
        ranks: list[int],
        timeout: float,
        board: Board,
        wire: Wire | None,
    ) -> None:
        self.group, self.backend = group, backend
        """`group` is None where torch knows of none: the ranks are threads."""
        self.rank, self.size = rank, len(ranks)
        self.ranks = ranks
        """Global rank of each member."""
        self.others = [other for other in range(self.size) if other != rank]
        self.timeout = timeout
        self.board, self.wire = board, wire
        """Without a wire an exchange is done at once, in the thread and on the stream of its caller."""
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._connection: Connection | None = None

    def next(self) -> tuple[int, "Connection"]:
        """Number an operation; in the order of the program, which is the same on all ranks."""
        with self._lock:
            number = next(self._numbers)
            if self._connection is None or self._connection.cause is not None:
                self._connection = Connection(self, number)
            return number, self._connection

    def close(self) -> None:
        """What is under way may end; nothing new begins."""
        if self.wire is not None and self.backend != "nccl":
            self.wire.close()
        self._connection = None

    def pause(self, seconds: float) -> None:
        """Let the other ranks get on."""
        time.sleep(seconds)

    def once(self, number: int, look: Callable[[], bool]) -> bool:
        """Return what `look` finds in operation `number`; ranks that share a device need not all look."""
        return look()

    @abstractmethod
    def connect(self, number: int, deadline: float) -> Link:
        """New connections, for the operations from `number` on; all ranks are about to make theirs."""


class ProcessChannel(Channel):
    """Between processes, over gloo or NCCL."""

    def __init__(self, group: dist.ProcessGroup, backend: str, device: torch.device) -> None:
        rank = dist.get_rank(group)
        super().__init__(
            group,
            backend,
            rank,
            dist.get_process_group_ranks(group),
            _timeout_of(group, device),
            Board(f"thinwire/{group.group_name}/{backend}", rank),
            # NCCL wants one order on every rank, over all groups; messages of gloo find their way by tag.
            _ordered_wire() if backend == "nccl" else Wire(),
        )

    def connect(self, number: int, deadline: float) -> Link:
        timeout = max(1.0, deadline - time.monotonic())
        if self.backend == "nccl":
            return NcclLink(self.ranks, self.rank, timeout)
        # All ranks are about to connect, so it does not take long; if one dies right now, gloo tries five times.
        return GlooLink(self.board.store(f"link/{number}"), self.rank, self.size, min(timeout, _CONNECT_SECONDS))


class Connection:
    """Connections that operations share from operation `number` on, and what ended them.

    Any error ends them on every rank: those who wait wake up, and the next operation makes new ones.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self.number = channel, number
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._link: Link | None = None
        self.cause: CollectiveError | None = None
        self.agreed: set[str] = set()
        """Calls that were compared between ranks, or are about to be."""

    @property
    def connected(self) -> bool:
        return self._link is not None

    def link(self, deadline: float) -> Link:
        """Made when every rank is about to; else a rank whose other operation failed would be waited for in vain."""
        with self._making:
            with self._lock:
                link, cause = self._link, self.cause
            if cause is not None:  # the others said long ago that they are about to connect, and would not come again
                raise RuntimeError(f"the connections have ended: {cause}")
            if link is None:
                self._meet(deadline)
                link = self._channel.connect(self.number, deadline)
                with self._lock:
                    self._link = link if self.cause is None else None
                if self.cause is not None:
                    link.close()
            return link

    def _meet(self, deadline: float) -> None:
        """All ranks take the same decision: to connect, if the last one comes before the first one gives up."""
        board, decision, pause = self._channel.board, f"connect/{self.number}", 1e-4
        if board.count(f"ready/{self.number}") == self._channel.size:
            board.write_once(decision, "yes")
        while (word := board.read(decision)) is None and board.lost is None:
            if self.cause is not None or self.told() is not None or time.monotonic() > deadline:
                board.write_once(decision, "no")
            self._channel.pause(pause)
            pause = min(0.02, 1.5 * pause)
        if word != "yes":
            raise RuntimeError("not all ranks came to connect" if board.lost is None else board.lost)

    def fail(self, error: CollectiveError) -> CollectiveError:
        """End everything under way, here and at the peers; the first cause is the one that counts."""
        with self._lock:
            if self.cause is not None:
                return self.cause
            self.cause, link, self._link = error, self._link, None
        text = json.dumps({"kind": type(error).__name__, "message": str(error), "ranks": error.ranks})
        self._channel.board.write_once(f"error/{self.number}", text)
        if link is not None:
            link.close()
        return error

    def told(self) -> CollectiveError | None:
        """What another rank, or this one, found."""
        text = self._channel.board.read(f"error/{self.number}")
        if text is None:
            return None
        found = json.loads(text)
        return _KINDS[found["kind"]](found["message"], found["ranks"])


_LOCK = threading.Lock()
_channels: dict[tuple[str, str], ProcessChannel] = {}
_world: dist.ProcessGroup | None = None
_wire: Wire | None = None


def channel_of(group: dist.ProcessGroup, backend: str, device: torch.device) -> ProcessChannel:
    """The channel of a group, made on first use and kept for as long as the default group lives."""
    global _world
    with _LOCK:
        if dist.group.WORLD is not _world:
            for old in _channels.values():
                old.close()
            _channels.clear()
            _world = dist.group.WORLD
        key = group.group_name, backend
        channel = _channels.get(key)
        if channel is None or channel.group is not group:
            _forget_destroyed()
            channel = _channels[key] = ProcessChannel(group, backend, device)
        return channel


def _forget_destroyed() -> None:
    """Connections and threads of groups that are no more."""
    living = dist.distributed_c10d._world.pg_map
    for key, channel in list(_channels.items()):
        if channel.group not in living:
            channel.close()
            del _channels[key]


def _ordered_wire() -> Wire:
    global _wire
    if _wire is None:
        _wire = Wire(ordered=True)
    return _wire


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    options = getattr(group._get_backend(device), "options", None)
    given: timedelta = getattr(options, "_timeout", dist.constants.default_pg_timeout)
    return given.total_seconds()
