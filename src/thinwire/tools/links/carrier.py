"""Forwards connections between ranks at a rate and with a delay, in an event loop.

Bytes pass the token bucket of the sender's uplink, wait for the delay, and pass that of the receiver's downlink. Later
bytes follow while earlier ones wait, so the delay does not limit the rate.
"""

import asyncio
import socket
import struct
import time
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

FASTEST = 2e9
"""Highest rate in bits per second."""
_BUCKET_SECONDS = 0.004
"""Capacity of the bucket, in seconds of the rate. System timers may be late by one or two milliseconds."""
_SMALLEST_PIECE, LARGEST_PIECE = 2_000, 256_000
_WINDOW_SECONDS, _SMALLEST_WINDOW = 4.0, 4 << 20
"""Bytes on their way in one direction of a connection: so many delays at the rate, but at least 4 MB; then the sender
waits, as with TCP's window. Without a rate, so many delays at the highest rate."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value with which a connection is closed by a reset, without sending the remaining data."""


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
    delay       seconds between a rank's uplink and another one's downlink.
    """

    def __init__(self, addresses: Sequence[str], rate: float | None, delay: float) -> None:
        self._addresses = addresses
        self.sent = [0] * len(addresses)
        """Bytes forwarded so far, by the rank that sent them."""
        self._plugged = [asyncio.Event() for _ in addresses]
        for plugged in self._plugged:
            plugged.set()
        self._ports: dict[tuple[int, int, int], asyncio.Server] = {}
        self._lines: set[_Line] = set()
        self.shape(rate, delay)

    def shape(self, rate: float | None, delay: float) -> None:
        """Set the rate and the delay of all links. A transfer in progress has the new ones from its next piece on."""
        bytes_a_second = None if rate is None else rate / 8
        self._delay = delay
        self._window = max(_SMALLEST_WINDOW, int(_WINDOW_SECONDS * delay * (rate or FASTEST) / 8))
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
        there, back = Delayed(), Delayed()
        jobs = [
            self._send(reader, there, source=source),
            self._deliver(there, far_writer, source=source, target=target),
            self._send(far_reader, back, source=target),
            self._deliver(back, writer, source=target, target=source),
        ]
        tasks = [asyncio.create_task(job) for job in jobs]
        with suppress(asyncio.CancelledError):  # else asyncio would print the cancellation by `close`
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.cancelled() or task.exception() is not None for task in tasks if task.done()):
            line.reset()  # one end was reset, so the other is too
        for task in tasks:
            task.cancel()
        self._lines.discard(line)
        for one in (writer, far_writer):
            one.close()

    async def _send(self, reader: StreamReader, delayed: "Delayed", source: int) -> None:
        """Take in one direction of a connection, at the rate of the sender's uplink, until it ends."""
        while data := await reader.read(self._up[source].piece):
            await self._up[source].take(len(data))
            await delayed.put(data, due=time.monotonic() + self._delay, window=self._window)
        await delayed.put(b"", due=time.monotonic() + self._delay, window=self._window)

    async def _deliver(self, delayed: "Delayed", writer: StreamWriter, source: int, target: int) -> None:
        """Pass on what is due, at the rate of the receiver's downlink, until an empty piece ends the connection."""
        while data := await delayed.get():
            await self._down[target].take(len(data))
            await self._plugged[source].wait()
            await self._plugged[target].wait()
            self.sent[source] += len(data)
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()


class Delayed:
    """Pieces of one direction of a connection that are on their way, with the times at which they are due."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._nbytes = 0
        self._changed = asyncio.Event()

    async def put(self, data: bytes, due: float, window: int) -> None:
        """Add a piece, and return when fewer bytes than the window are on their way."""
        self._pieces.append((due, data))
        self._nbytes += len(data)
        self._changed.set()
        while self._nbytes >= window:
            self._changed.clear()
            await self._changed.wait()

    async def get(self) -> bytes:
        """Wait until the first piece is due, and return it."""
        while not self._pieces:
            self._changed.clear()
            await self._changed.wait()
        due, data = self._pieces[0]
        left = due - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)
        self._pieces.popleft()
        self._nbytes -= len(data)
        self._changed.set()
        return data


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
