"""This rank's end of a process group: it numbers the operations and holds their shared connections."""

import itertools
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from .board import Board
from .errors import CollectiveError, PeerError, read_notice, write_notice
from .forks import in_child
from .link import GlooLink, Link, NcclLink
from .wire import Wire

_CONNECT_SECONDS = 60.0


@dataclass(kw_only=True, eq=False)
class Channel:
    """One group with one backend."""

    rank: int
    ranks: list[int]  # global ones
    timeout: float
    board: Board
    wire: Wire | None  # without it, exchanges run at once, in the thread and on the stream of the caller
    backend: str = "gloo"
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        self.size, self.me = len(self.ranks), self.ranks[self.rank]
        self.others = [other for other in range(self.size) if other != self.rank]
        self.users = itertools.count()  # numbers for synchronizers, as they first use this channel
        self._lock, self._numbers = threading.Lock(), itertools.count(1)
        self._connection: Connection | None = None

    def next(self) -> tuple[int, "Connection"]:
        """Return the number and the connection of a new operation. The order of calls is the same on all ranks."""
        with self._lock:
            number = next(self._numbers)
            if self._connection is None or self._connection.cause is not None:
                self._connection = Connection(self, number)
            return number, self._connection

    def close(self) -> None:
        """Close the wire, unless NCCL groups share it, and drop the connection. Operations under way may finish."""
        if self.wire is not None and self.backend != "nccl":
            self.wire.close()
        self._connection = None

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def find_silent(self) -> PeerError | None:
        """Return an error that names a member without a sign of life, where members give one."""
        return None

    def connect(self, number: int, deadline: float) -> Link:
        """Return a new link for the operations from `number` on. All ranks are about to make theirs."""
        timeout = max(1.0, deadline - time.monotonic())
        if self.backend == "nccl":
            return NcclLink(self.ranks, self.rank, timeout)
        # All ranks are about to connect, so this is fast. If a rank dies right now, gloo tries five times.
        store, timeout = self.board.store(f"link/{number}"), min(timeout, _CONNECT_SECONDS)
        return GlooLink(store=store, rank=self.rank, size=self.size, timeout=timeout)


class Connection:
    """Connections that operations share from operation `number` on, and the error that ended them.

    Any error ends the connections on every rank: all waits fail, and the next operation makes new connections.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self.number = channel, number
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._link: Link | None = None
        self.cause: CollectiveError | None = None
        self.agreed: set[str] = set()  # calls, as JSON, that were compared or are about to be

    @property
    def connected(self) -> bool:
        return self._link is not None

    def link(self, deadline: float) -> Link:
        """Return the link, made when all are ready. Raise RuntimeError if a rank is not, or it was closed."""
        with self._making:
            with self._lock:
                link, cause = self._link, self.cause
            if cause is not None:  # the other ranks have already agreed to connect, and do not repeat it
                raise RuntimeError(f"the connections were closed: {cause}")
            if link is None:
                self._wait_for_all(deadline)
                link = self._channel.connect(self.number, deadline)
                with self._lock:
                    self._link = link if self.cause is None else None
                if self.cause is not None:
                    link.close()
            return link

    def _wait_for_all(self, deadline: float) -> None:
        """Wait until all ranks are ready to connect, or raise RuntimeError; all ranks take the same decision."""
        board, decision, pause = self._channel.board, f"connect/{self.number}", 1e-4
        if board.count(f"ready/{self.number}") == self._channel.size:
            board.write_once(decision, "yes")
        while (word := board.read(decision)) is None and board.lost is None:
            silent = self._channel.find_silent()
            if silent is not None:
                self.fail(silent)
            if self.reported_error() is not None or time.monotonic() > deadline:
                board.write_once(decision, "no")
            self._channel.pause(pause)
            pause = min(0.02, 1.5 * pause)
        if word != "yes":
            raise RuntimeError("not all ranks were ready to connect" if board.lost is None else board.lost)

    def fail(self, error: CollectiveError) -> CollectiveError:
        """End all operations under way, on this rank and its peers. Return the first cause, which is kept."""
        with self._lock:
            if self.cause is not None:
                return self.cause
            self.cause, link, self._link = error, self._link, None
        self._channel.board.write_once(f"error/{self.number}", write_notice(error))
        if link is not None:
            link.close()
        return error

    def reported_error(self) -> CollectiveError | None:
        """Return the error that ended the connections, here or as a rank has written on the board; else None.

        What no rank can have written is ignored.
        """
        if self.cause is not None:
            return self.cause
        text = self._channel.board.read(f"error/{self.number}")
        return None if text is None else read_notice(text)


_LOCK = threading.Lock()
_channels: dict[tuple[str, str], Channel] = {}


def _drop_channels() -> object:
    global _LOCK, _channels
    dropped, _channels, _LOCK = (_channels, _ordered_wire), {}, threading.Lock()
    _ordered_wire.cache_clear()
    return dropped


in_child(_drop_channels)


def channel_of(group: dist.ProcessGroup, backend: str, device: torch.device) -> Channel:
    """Return the channel of a group. It is made on first use and kept until the group is destroyed."""
    with _LOCK:
        key = group.group_name, backend
        channel = _channels.get(key)
        if channel is None or channel.group is not group:
            _forget_destroyed()
            options = getattr(group._get_backend(device), "options", None)
            timeout: timedelta = getattr(options, "_timeout", dist.constants.default_pg_timeout)
            rank = dist.get_rank(group)
            channel = _channels[key] = Channel(
                group=group,
                backend=backend,
                rank=rank,
                ranks=dist.get_process_group_ranks(group),
                timeout=timeout.total_seconds(),
                board=Board(f"thinwire/{group.group_name}/{backend}", rank),
                # NCCL needs one order on every rank, over all groups; gloo matches messages by tag.
                wire=_ordered_wire() if backend == "nccl" else Wire(),
            )
        return channel


def _forget_destroyed() -> None:
    living = dist.distributed_c10d._world.pg_map
    for key, channel in list(_channels.items()):
        if channel.group not in living:
            channel.close()
            del _channels[key]


def close_destroyed() -> None:
    """Close the channels of destroyed groups now, not when the next channel is made."""
    with _LOCK:
        _forget_destroyed()


@cache
def _ordered_wire() -> Wire:
    return Wire(ordered=True)
