"""The bytes' way from rank to rank: point-to-point messages on connections of thinwire's own.

Of its own, so that an operation may run in a thread beside the program's own collectives, in any order, and so that a
failure leaves the program's group as it was. Point to point, because gloo then says which peer a wait is for, and
because its messages carry a tag: ranks that call with different arguments never meet, where a collective would abort
the process ("Received data size doesn't match expected size"). NCCL has no tags; there, operations are issued in one
order.
"""

import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Buffers = Mapping[int, Tensor]
"""A contiguous uint8 tensor for each peer, by its rank in the group. Empty ones are not sent."""


class Seen(NamedTuple):
    """What was sent and received, where it can be read soonest: in host memory, if it passed there."""

    sent: Buffers
    received: Buffers


Wait = Callable[[float, Callable[[int], None]], Seen]
"""(deadline, waits_for): wait until everything is sent and received; `waits_for` is told which peer is waited for.
`LinkBroken` if one fails."""


class LinkBroken(Exception):
    """A message did not arrive from, or could not be sent to, `peer`."""

    def __init__(self, peer: int, late: bool, reason: str) -> None:
        super().__init__(essence(reason))
        self.peer, self.late = peer, late


class Link(ABC):
    """Connections between the ranks of one group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abstractmethod
    def post(self, sends: Buffers, receives: Buffers, tag: int) -> Wait:
        """Begin to send and receive everything, and return what waits for it. `LinkBroken` if a peer is gone."""

    @abstractmethod
    def close(self) -> None:
        """End all that is under way, here and at the peers, with `LinkBroken`."""


class GlooLink(Link):
    """Over gloo. Tensors of an accelerator are staged through pinned memory: only payloads cross."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))

    def post(self, sends: Buffers, receives: Buffers, tag: int) -> Wait:
        different = {id(buffer): buffer for buffer in sends.values() if buffer.numel()}  # one may be for all peers
        staged = {name: _to_host(buffer) for name, buffer in different.items()}
        outgoing = {peer: staged[id(buffer)] for peer, buffer in sends.items() if buffer.numel()}
        incoming = {peer: _host_buffer(buffer) for peer, buffer in receives.items() if buffer.numel()}
        _synchronize(outgoing, sends)
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
        # A wait that runs out of time makes gloo close every connection of its group.
        peer = (self.rank + 1) % self.size
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, 2**31 - 1).wait(timedelta(milliseconds=1))


class NcclLink(Link):
    """Over NCCL: grouped sends and receives on the current stream, which the host then waits for."""

    def __init__(self, ranks: list[int], rank: int, timeout: float) -> None:
        super().__init__(rank, len(ranks))
        self._ranks = ranks
        self._group = dist.new_group(
            ranks, timedelta(seconds=timeout), "nccl", use_local_synchronization=True, group_desc="thinwire"
        )

    def post(self, sends: Buffers, receives: Buffers, tag: int) -> Wait:
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


def essence(message: str) -> str:
    """Without the source file and the advice that gloo puts around.

    >>> essence("[/gloo/pair.cc:553] Connection closed by peer [::1]:9. This is typically caused by luck. GLHF!")
    'Connection closed by peer [::1]:9'
    """
    return re.sub(r"^\[\S+:\d+\] |\. This is typically caused .*", "", message.strip(), flags=re.DOTALL)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """gloo or nccl: what carries tensors of this device in the group."""
    for entry in str(dist.get_backend_config(group)).split(","):
        kind, _, backend = entry.rpartition(":")
        if kind in ("", device.type):
            if backend in ("gloo", "nccl"):
                return backend
            raise ValueError(f"the group carries {device.type} tensors over {backend!r}, expected gloo or nccl")
    raise ValueError(f"the group ({dist.get_backend_config(group)}) carries no tensors of {device}")


def _to_host(buffer: Tensor) -> Tensor:
    return buffer if buffer.device.type == "cpu" else _host_buffer(buffer).copy_(buffer, non_blocking=True)


def _host_buffer(buffer: Tensor) -> Tensor:
    return buffer if buffer.device.type == "cpu" else torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)


def _synchronize(outgoing: Buffers, sends: Buffers) -> None:
    """Copies to pinned memory are asynchronous: gloo must not read before they have arrived."""
    if any(outgoing[peer] is not sends[peer] for peer in outgoing):
        arrived = torch.cuda.Event(blocking=True)
        arrived.record()
        arrived.synchronize()
