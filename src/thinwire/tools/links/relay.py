"""Slow links without any rights: ranks are connected through a relay that limits the rate.

    with Relay(ranks=2, rate=100e6) as relay:
        relay.links.enter(0)                 # in the process of rank 0, before it creates a process group
        relay.sent_bytes()                   # by rank

gloo connects ranks directly, at addresses that they exchange, so the relay has to replace these (see `relayed`). Each
rank has its own address on the loopback interface, which on Linux is all of 127.0.0.0/8 and needs no rights. For each
rank that connects to a port of another rank, the relay opens a port of its own at the same address, and the rank gets
this port instead. Incoming bytes pass the token bucket of the sender's uplink and then that of the receiver's downlink.
A rank therefore sends and receives at most at the rate, over all its connections, both those to the store and those of
process groups.

The relay is a thread of the process that starts the ranks, so it leaves nothing behind. It copies every byte in Python
while the ranks run. At several Gbit/s the relay itself would be the bottleneck, so such rates are refused. It counts
the bytes that ranks write: the headers of gloo are included, those of TCP and Ethernet, about 5 %, are not.
"""

import asyncio
import json
import socket
import struct
import sys
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

from thinwire.tools.loopback import Counter

from . import LARGEST_WORLD

T = TypeVar("T")
FASTEST = 2e9
"""Highest rate in bits per second."""
_NETWORK = "127.83.0"
_CONTROL = "127.0.0.1"
_LIMIT_SECONDS = 30.0
_BUCKET_SECONDS = 0.004
"""Capacity of the bucket, in seconds of the rate. System timers may be late by one or two milliseconds."""
_SMALLEST_PIECE, LARGEST_PIECE = 2_000, 256_000
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value with which a connection is closed by a reset, without sending the remaining data."""


@dataclass(frozen=True)
class RelayLinks:
    """The part of a relay that is sent to the process of each rank."""

    control: int
    """Port at which the relay accepts requests for other ports."""
    ranks: int

    @property
    def counter(self) -> Counter:
        """Return the counter of the loopback interface, on which all ranks send to the relay, and the relay to them."""
        return Counter("lo", times=2 * self.ranks)

    def enter(self, rank: int) -> None:
        """Make this process rank `rank`. Its gloo groups then connect through the relay."""
        from .relayed import connect_through  # needs torch, but the process that starts the ranks does not

        connect_through(self, rank)

    def address(self, rank: int) -> str:
        """Return the IP address at which a rank listens."""
        return _address(rank)

    def reach(self, source: int, rank: int, port: int) -> tuple[str, int]:
        """Return the address and port to which `source` connects to reach this port of a rank."""
        if source == rank:
            return _address(rank), port
        with socket.create_connection((_CONTROL, self.control), _LIMIT_SECONDS) as line, line.makefile("rw") as words:
            words.write(json.dumps([source, rank, port]) + "\n")
            words.flush()
            return _address(rank), int(json.loads(words.readline()))


class Relay:
    """Links through a relay. Use it as a context manager.

    ranks   number of ranks.
    rate    rate of each link in bits per second. None means no limit.
    """

    def __init__(self, ranks: int, rate: float | None) -> None:
        if sys.platform != "linux":
            raise ValueError(f"the relay needs addresses of 127.0.0.0/8, which Linux has, and {sys.platform} has not")
        if not 1 <= ranks <= LARGEST_WORLD:
            raise ValueError(f"{ranks} ranks, expected 1 to {LARGEST_WORLD}")
        self._ranks, self._rate = ranks, _checked(rate)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="thinwire-relay", daemon=True)

    @property
    def links(self) -> RelayLinks:
        """Return the part that is sent to the process of each rank."""
        return RelayLinks(self._control.sockets[0].getsockname()[1], self._ranks)

    def shape(self, rate: float | None) -> None:
        """Set the rate of all links."""
        self._call(self._carrier.shape, _checked(rate))

    def cut(self, rank: int) -> None:
        """Stop forwarding from and to a rank. No rank gets an error from it."""
        self._call(self._carrier.cut, rank)

    def drop(self, rank: int) -> None:
        """Stop forwarding from and to a rank and reset its connections. Ranks that use them get an error."""
        self._call(self._carrier.drop, rank)

    def sent_bytes(self) -> list[int]:
        """Return the bytes sent so far by each rank."""
        return list(self._carrier.sent)

    def __enter__(self) -> Self:
        self._thread.start()
        self._carrier = self._call(Carrier, [_address(rank) for rank in range(self._ranks)], self._rate)
        self._control = self._wait(asyncio.start_server(self._answer, _CONTROL, 0))
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self._control.close)  # in its own thread: asyncio's servers are not thread-safe
        self._wait(self._carrier.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_SECONDS)
        self._loop.close()

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer a request of `RelayLinks.reach`."""
        with closing(writer):
            source, rank, port = json.loads(await reader.readline())
            writer.write(f"{await self._carrier.port(source, rank, port)}\n".encode())
            await writer.drain()

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the thread of the relay and return its result."""

        async def called() -> T:
            return function(*args)

        return self._wait(called())

    def _wait(self, job: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(_LIMIT_SECONDS)


def _address(rank: int) -> str:
    return f"{_NETWORK}.{rank + 1}"


def _checked(rate: float | None) -> float | None:
    if rate is not None and not 1e5 <= rate <= FASTEST:
        raise ValueError(f"a rate of {rate:g} bit/s, expected 100 kbit/s to {FASTEST / 1e9:g} Gbit/s through a relay")
    return rate


class _Line(NamedTuple):
    """A forwarded connection."""

    ranks: tuple[int, int]
    near: StreamWriter
    far: StreamWriter

    def reset(self) -> None:
        for writer in (self.near, self.far):
            if not writer.transport.is_closing():
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()


class Carrier:
    """Forwards the connections of all ranks.

    addresses   IP address of each rank.
    rate        rate of each link in bits per second. None means no limit.
    """

    def __init__(self, addresses: Sequence[str], rate: float | None) -> None:
        self._addresses = addresses
        self.sent = [0] * len(addresses)
        """Bytes forwarded so far, by the rank that sent them."""
        self._plugged = [asyncio.Event() for _ in addresses]
        for plugged in self._plugged:
            plugged.set()
        self._ports: dict[tuple[int, int, int], asyncio.Server] = {}
        self._lines: set[_Line] = set()
        self.shape(rate)

    def shape(self, rate: float | None) -> None:
        """Set the rate of all links. A transfer in progress uses the new rate from its next piece on."""
        bytes_a_second = None if rate is None else rate / 8
        self._up, self._down = ([TokenBucket(bytes_a_second) for _ in self._addresses] for _ in range(2))

    def cut(self, rank: int) -> None:
        """Stop forwarding from and to a rank. Its connections stay open."""
        self._plugged[rank].clear()

    def drop(self, rank: int) -> None:
        """Stop forwarding from and to a rank and reset its connections."""
        self.cut(rank)
        for line in self._lines:
            if rank in line.ranks:
                line.reset()

    async def port(self, source: int, target: int, port: int) -> int:
        """Return the port at which `source` reaches this port of `target`."""
        key = source, target, port
        if key not in self._ports:
            self._ports[key] = await asyncio.start_server(
                partial(self._accept, source, target, port), self._addresses[target], 0, limit=LARGEST_PIECE
            )
        return int(self._ports[key].sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Close all ports and cancel all transfers."""
        for server in self._ports.values():
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, source: int, target: int, port: int, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._addresses[target], port, limit=LARGEST_PIECE)
        except (OSError, asyncio.CancelledError):  # the target has stopped listening, or the relay is closing
            writer.transport.abort()
            return
        line = _Line((source, target), writer, far_writer)
        self._lines.add(line)
        both = [
            self._carry(reader, writer=far_writer, source=source, target=target),
            self._carry(far_reader, writer=writer, source=target, target=source),
        ]
        tasks = [asyncio.create_task(direction) for direction in both]
        with suppress(asyncio.CancelledError):  # else asyncio would print the cancellation by `close`
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.cancelled() or task.exception() is not None for task in tasks if task.done()):
            line.reset()  # one end was reset, so the other is too
        for task in tasks:
            task.cancel()
        self._lines.discard(line)
        for one in (writer, far_writer):
            one.close()

    async def _carry(self, reader: StreamReader, writer: StreamWriter, source: int, target: int) -> None:
        """Forward one direction of a connection until it ends."""
        while data := await reader.read(self._up[source].piece):
            await self._up[source].take(len(data))
            await self._down[target].take(len(data))
            await self._plugged[source].wait()
            await self._plugged[target].wait()
            self.sent[source] += len(data)
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()


class TokenBucket:
    """A token bucket. Its level may become negative, and the caller then waits until it would be zero again.

    rate   bytes per second. None means no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate, self._at = rate, time.monotonic()
        self._full = 0.0 if rate is None else max(rate * _BUCKET_SECONDS, 2.0 * _SMALLEST_PIECE)
        self._level = self._full

    @property
    def piece(self) -> int:
        """Return the largest number of bytes to take at once, so that all users of the bucket get their turn."""
        if self._rate is None:
            return LARGEST_PIECE
        return int(min(LARGEST_PIECE, max(_SMALLEST_PIECE, self._rate * _BUCKET_SECONDS / 2)))

    async def take(self, nbytes: int) -> None:
        """Take `nbytes` tokens and return when so many bytes may pass, in the order of the calls."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._level = min(self._full, self._level + (now - self._at) * self._rate) - nbytes
        self._at = now
        if self._level < 0:
            await asyncio.sleep(-self._level / self._rate)
