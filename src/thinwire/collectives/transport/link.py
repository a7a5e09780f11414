"""Point-to-point messages between ranks, on connections that only thinwire uses.

So an operation runs in a thread beside the program's own collectives, in any order, and a failure does not harm the
program's process group. Each wait in gloo is for one peer, so an error can name it. And gloo's messages have a tag,
which differs between ranks that call with different arguments, where a collective of gloo would abort the process.
NCCL has no tags, so operations on NCCL are issued in one order.
"""

import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from .forks import in_child, new_sockets_closed_in_children

Buffers = Mapping[int, Tensor]
"""A contiguous uint8 tensor for each peer, by the peer's rank in the group. Empty tensors are not sent."""

NEVER_SENT = 2**31 - 1  # a tag that no message has


class Seen(NamedTuple):
    """Buffers that were sent and received. If they were staged through pinned memory, these are the pinned copies."""

    sent: Buffers
    received: Buffers


Wait = Callable[[float, Callable[[int], None]], Seen]
"""Function (deadline, waits_for) that calls `waits_for` with each peer that it waits for, or raises `LinkBroken`."""


class LinkBroken(Exception):
    """A message from `peer` did not arrive, or a message to `peer` could not be sent."""

    def __init__(self, peer: int, late: bool, reason: str) -> None:
        # gloo's messages have a source file in front, and advice behind.
        super().__init__(re.sub(r"^\[\S+:\d+\] |\. This is typically caused .*", "", reason.strip(), flags=re.DOTALL))
        self.peer, self.late = peer, late


class Link(ABC):
    """Connections between the ranks of one group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abstractmethod
    def post(self, sends: Buffers, receives: Buffers, tag: int) -> Wait:
        """Start to send and receive, and return a function that waits for it. Raise `LinkBroken` if a peer is gone."""

    @abstractmethod
    def close(self) -> None:
        """End all messages under way with `LinkBroken`, on this rank and on its peers."""

    @abstractmethod
    def check(self) -> None:
        """Raise `LinkBroken` if the connection to a peer is known to be closed."""


_gloo_groups: "WeakSet[Any]" = WeakSet()
in_child(lambda: list(_gloo_groups))


class GlooLink(Link):
    """A link over gloo. Payloads on an accelerator are staged through pinned memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)
        with new_sockets_closed_in_children():
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        _gloo_groups.add(self._group)
        self._never_received: list[Wait] = []  # keeps the buffers of `check`, which gloo may still refer to

    def post(self, sends: Buffers, receives: Buffers, tag: int) -> Wait:
        different = {id(buffer): buffer for buffer in sends.values() if buffer.numel()}  # one can be for all peers
        staged = {name: _to_host(buffer) for name, buffer in different.items()}
        outgoing = {peer: staged[id(buffer)] for peer, buffer in sends.items() if buffer.numel()}
        incoming = {peer: _host_buffer(buffer) for peer, buffer in receives.items() if buffer.numel()}
        if any(outgoing[peer] is not sends[peer] for peer in outgoing):  # copied to pinned memory, which gloo reads now
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
            arrived.synchronize()
        works: list[tuple[int, Any]] = []
        # Each rank begins with its right neighbour, so that not all of them send to the same rank at once.
        for peer in sorted({*outgoing, *incoming}, key=lambda peer: (peer - self.rank) % self.size):
            try:
                if peer in incoming:
                    works.append((peer, self._group.recv([incoming[peer]], peer, tag)))
                if peer in outgoing:
                    works.append((peer, self._group.send([outgoing[peer]], peer, tag)))
            except RuntimeError as error:
                raise LinkBroken(peer, False, str(error)) from error

        def wait(deadline: float, waits_for: Callable[[int], None]) -> Seen:
            for peer, work in works:
                waits_for(peer)
                remaining = deadline - time.monotonic()
                try:
                    work.wait(timedelta(seconds=max(0.001, remaining)))
                except RuntimeError as error:
                    raise LinkBroken(peer, time.monotonic() >= deadline, str(error)) from error
            for peer, buffer in incoming.items():
                if buffer is not receives[peer]:
                    receives[peer].copy_(buffer, non_blocking=True)
            return Seen(outgoing, incoming)

        return wait

    def close(self) -> None:
        """Close every connection of this link: all that wait for this rank get an error."""
        # A wait that times out makes gloo do that; one for a peer whose connection is closed does not.
        for distance in range(1, self.size):
            with contextlib.suppress(RuntimeError):
                buffer = torch.empty(1, dtype=torch.uint8)
                peer = (self.rank + distance) % self.size
                self._group.recv([buffer], peer, NEVER_SENT).wait(timedelta(milliseconds=1))

    def check(self) -> None:
        # gloo refuses to receive on a closed connection.
        buffers = {peer: torch.empty(1, dtype=torch.uint8) for peer in range(self.size) if peer != self.rank}
        self._never_received.append(self.post({}, buffers, NEVER_SENT))


class NcclLink(Link):
    """A link over NCCL. Sends and receives are grouped on the current stream, and the host waits for them."""

    def __init__(self, ranks: list[int], rank: int, timeout: float) -> None:
        super().__init__(rank, len(ranks))
        self._ranks = ranks
        self._group = dist.new_group(
            ranks, timedelta(seconds=timeout), "nccl", use_local_synchronization=True, group_desc="thinwire"
        )

    def post(self, sends: Buffers, receives: Buffers, tag: int) -> Wait:
        """Queue grouped sends and receives, and return a function that waits for them. NCCL ignores `tag`."""
        todo = [
            dist.P2POp(function, buffer, self._ranks[peer], self._group)
            for function, buffers in ((dist.irecv, receives), (dist.isend, sends))
            for peer, buffer in buffers.items()
            if buffer.numel()
        ]
        peer = next(iter(receives), self.rank)
        done = torch.cuda.Event()
        try:
            for work in dist.batch_isend_irecv(todo) if todo else ():
                work.wait()
        except RuntimeError as error:
            raise LinkBroken(peer, False, str(error)) from error
        done.record()

        def wait(deadline: float, waits_for: Callable[[int], None]) -> Seen:
            waits_for(peer)
            pause = 2e-5
            while not done.query():
                if time.monotonic() >= deadline:
                    raise LinkBroken(peer, True, "NCCL has not finished")
                time.sleep(pause)
                pause = min(1e-3, 1.5 * pause)
            return Seen(sends, receives)

        return wait

    def close(self) -> None:
        self._group.abort()

    def check(self) -> None:
        """Do nothing: NCCL does not tell."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the group's backend for tensors of this device. Raise ValueError unless it is gloo or nccl."""
    for item in str(dist.get_backend_config(group)).split(","):
        kind, _, backend = item.rpartition(":")
        if kind in ("", device.type):
            if backend in ("gloo", "nccl"):
                return backend
            raise ValueError(f"the group sends {device.type} tensors by {backend!r}, expected gloo or nccl")
    raise ValueError(f"the group ({dist.get_backend_config(group)}) cannot send tensors on {device}")


def _to_host(buffer: Tensor) -> Tensor:
    return buffer if buffer.device.type == "cpu" else _host_buffer(buffer).copy_(buffer, non_blocking=True)


def _host_buffer(buffer: Tensor) -> Tensor:
    return buffer if buffer.device.type == "cpu" else torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
