"""Slow links without any rights: ranks are connected through a relay that limits the rate.

    with Relay(ranks=2, rate=100e6) as relay:
        relay.links.enter(0)                 # in the process of rank 0, before it creates a process group
        relay.sent_bytes()                   # by rank

gloo connects ranks directly, at addresses that they exchange, so the relay has to replace these (see `relayed`). Each
rank has its own address on the loopback interface, which on Linux is all of 127.0.0.0/8 and needs no rights. For each
rank that connects to a port of another rank, the relay opens a port of its own at the same address, and the rank gets
this port instead. Incoming bytes pass the token bucket of the sender's uplink and then that of the receiver's downlink.
A rank therefore sends and receives at most at the rate, over all its connections, both those to the store and those of
process groups. With a round-trip time, bytes that have passed the uplink wait for half of it before the downlink, in a
queue of each direction of a connection, while later ones follow.

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
from collections.abc import Coroutine
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

T = TypeVar("T")
FASTEST = 2e9  # Highest rate in bits per second
_NETWORK = "127.83.0"
_CONTROL = "127.0.0.1"
_LIMIT_SECONDS = 30.0
_WINDOW_SECONDS, _SMALLEST_WINDOW = 4.0, 4 << 20
"""Bytes on their way in one direction of a connection: so many delays at the rate, but at least 4 MB; then the sender
waits, as with TCP's window. Without a rate, so many delays at the highest rate."""
_BUCKET_SECONDS = 0.004
"""Capacity of the bucket, in seconds of the rate. System timers may be late by one or two milliseconds."""
_PAUSE_SECONDS = 0.001  # Seconds after which a sender looks again whether fewer bytes are on their way
_SMALLEST_PIECE, _LARGEST_PIECE = 2_000, 256_000
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value with which a connection is closed by a reset, without sending the remaining data."""


@dataclass(frozen=True)
class RelayLinks:
    """The part of a relay that is sent to the process of each rank."""

    control: int  # Port at which the relay accepts requests for other ports
    ranks: int

    def enter(self, rank: int) -> None:
        """Make this process rank `rank`. Its gloo groups then connect through the relay."""
        from .relayed import connect_through  # needs torch, but the process that starts the ranks does not

        connect_through(self, rank)

    def address(self, rank: int) -> str:
        return _address(rank)

    def reach(self, source: int, rank: int, port: int) -> tuple[str, int]:
        """Return the address and port to which `source` connects to reach this port of a rank."""
        if source == rank:
            return _address(rank), port
        with socket.create_connection((_CONTROL, self.control), _LIMIT_SECONDS) as line, line.makefile("rw") as words:
            words.write(json.dumps([source, rank, port]) + "\n")
            words.flush()
            return _address(rank), int(json.loads(words.readline()))


class _Delayed(asyncio.Queue[tuple[float, bytes]]):
    """Pieces of one direction of a connection that are on their way, with the times at which they are due."""

    nbytes = 0


class _TokenBucket:
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
            return _LARGEST_PIECE
        return int(min(_LARGEST_PIECE, max(_SMALLEST_PIECE, self._rate * _BUCKET_SECONDS / 2)))

    async def take(self, nbytes: int) -> None:
        """Take `nbytes` tokens and return when so many bytes may pass, in the order of the calls."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._level = min(self._full, self._level + (now - self._at) * self._rate) - nbytes
        self._at = now
        if self._level < 0:
            await asyncio.sleep(-self._level / self._rate)


class Relay:
    """Links through a relay. Use it as a context manager.

    ranks        number of ranks.
    rate         rate of each link in bits per second. None means no limit.
    round_trip   seconds until the answer to a byte to another rank arrives, besides the time at the rate.
    """

    def __init__(self, ranks: int, rate: float | None, round_trip: float = 0.0) -> None:
        if sys.platform != "linux":
            raise ValueError(f"the relay needs addresses of 127.0.0.0/8, which Linux has, and {sys.platform} has not")
        self._sent, self._cut = [0] * ranks, set[int]()
        self.shape(rate, round_trip)
        self._ports: dict[tuple[int, int, int], asyncio.Server] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="thinwire-relay", daemon=True)

    @property
    def links(self) -> RelayLinks:
        return RelayLinks(self._control.sockets[0].getsockname()[1], len(self._sent))

    def shape(self, rate: float | None, round_trip: float = 0.0) -> None:
        """Set the rate and the round-trip time of all links, for the pieces that come from now on."""
        if rate is not None and not 1e5 <= rate <= FASTEST:
            expected = f"100 kbit/s to {FASTEST / 1e9:g} Gbit/s through a relay"
            raise ValueError(f"a rate of {rate:g} bit/s, expected {expected}")
        self._delay = round_trip / 2
        self._window = max(_SMALLEST_WINDOW, int(_WINDOW_SECONDS * self._delay * (rate or FASTEST) / 8))
        self._up, self._down = ([_TokenBucket(rate and rate / 8) for _ in self._sent] for _ in range(2))

    def cut(self, rank: int) -> None:
        """Let nothing pass from or to a rank from now on. No rank gets an error."""
        self._cut.add(rank)

    def sent_bytes(self) -> list[int]:
        return list(self._sent)

    def __enter__(self) -> Self:
        self._thread.start()
        self._control = self._wait(asyncio.start_server(self._answer, _CONTROL, 0))
        return self

    def __exit__(self, *error: object) -> None:
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_SECONDS)
        self._loop.close()

    def _wait(self, job: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(_LIMIT_SECONDS)

    async def _close(self) -> None:
        """Close all ports and cancel all transfers."""
        for server in (self._control, *self._ports.values()):
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer a request of `RelayLinks.reach`: the port at which a rank reaches a port of another one."""
        with closing(writer):
            source, target, port = key = tuple(json.loads(await reader.readline()))
            if key not in self._ports:
                self._ports[key] = await asyncio.start_server(
                    partial(self._accept, source, target, port), _address(target), 0, limit=_LARGEST_PIECE
                )
            writer.write(f"{self._ports[key].sockets[0].getsockname()[1]}\n".encode())
            await writer.drain()

    async def _accept(self, source: int, target: int, port: int, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(_address(target), port, limit=_LARGEST_PIECE)
        except (OSError, asyncio.CancelledError):  # the target has stopped listening, or the relay is closing
            writer.transport.abort()
            return
        tasks = []
        for end, other, *way in ((reader, far_writer, source, target), (far_reader, writer, target, source)):
            delayed = _Delayed()
            jobs = self._send(end, delayed, way[0]), self._deliver(delayed, other, *way)
            tasks += [asyncio.create_task(job) for job in jobs]
        with suppress(asyncio.CancelledError):  # else asyncio would print the cancellation by `_close`
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        has_failed = any(task.cancelled() or task.exception() is not None for task in tasks if task.done())
        for task in tasks:
            task.cancel()
        for one in (writer, far_writer):
            if has_failed and not one.transport.is_closing():  # one end was reset, so the other is too
                one.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                one.transport.abort()
            one.close()

    async def _send(self, reader: StreamReader, delayed: _Delayed, source: int) -> None:
        """Take in one direction of a connection, at the rate of the sender's uplink, until it ends."""
        data = None
        while data != b"":
            data = await reader.read(self._up[source].piece)
            await self._up[source].take(len(data))
            delayed.nbytes += len(data)
            await delayed.put((time.monotonic() + self._delay, data))
            while delayed.nbytes >= self._window:
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _deliver(self, delayed: _Delayed, writer: StreamWriter, source: int, target: int) -> None:
        """Pass on what is due, at the rate of the receiver's downlink, until an empty piece ends the connection."""
        while True:
            due, data = await delayed.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            delayed.nbytes -= len(data)
            if self._cut & {source, target}:
                await asyncio.Event().wait()  # until the relay closes
            if not data:
                break
            await self._down[target].take(len(data))
            self._sent[source] += len(data)
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()


def _address(rank: int) -> str:
    return f"{_NETWORK}.{rank + 1}"
