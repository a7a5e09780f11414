"""Accepts the connections of ranks and forwards their bytes through the token buckets of both ends.

Everything runs in one event loop, in one thread.
"""

import asyncio
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from .token_bucket import LARGEST_PIECE, TokenBucket

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
        ways = [self._carry(reader, far_writer, source, target), self._carry(far_reader, writer, target, source)]
        tasks = [asyncio.create_task(way) for way in ways]
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
