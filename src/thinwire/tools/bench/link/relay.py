"""Slow links without any rights: ranks talk through a relay, which holds their bytes back to a rate.

    with Relay(ranks=2, rate=100e6) as relay:
        relay.links.enter(0)                 # in the process of rank 0, before it makes a group
        relay.sent_bytes()                   # by rank

gloo connects ranks directly, at addresses that they tell each other; so it is these that have to change. Each rank has
an address of its own on the loopback interface, which on Linux is all of 127.0.0.0/8 and needs no rights. For each rank
that wants to connect to a port of another the relay opens one of its own, at the same address: that is what the rank is
told (`relayed` says how), and all that changes for gloo is the number of a port. What comes in passes the token bucket
of the sender's uplink, then that of the receiver's downlink: a rank sends and receives at the rate at most, over all
its connections, store and groups alike.

The relay is a thread of the process that starts the ranks, so nothing can be left behind by it. It copies every byte
beside the ranks, in Python: at several Gbit/s it would be the relay that is measured, so such rates are refused. It
counts what ranks hand over: the headers of TCP and Ethernet, about 5 %, are not in it, those of gloo are.
"""

import asyncio
import json
import socket
import sys
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from .carrier import Carrier

T = TypeVar("T")
LARGEST = 64
FASTEST = 2e9
"""Bits a second."""
_NETWORK = "127.83.0"
_CONTROL = "127.0.0.1"
_LIMIT_SECONDS = 30.0


@dataclass(frozen=True)
class RelayLinks:
    """What a rank needs to know of a relay; goes to its process."""

    control: int
    """The port at which the relay is asked for others."""
    ranks: int

    def enter(self, rank: int) -> None:
        """Make this process a rank: its gloo groups connect through the relay."""
        from .relayed import connect_through  # which needs torch; the process that starts the ranks does not

        connect_through(self, rank)

    def address(self, rank: int) -> str:
        return _address(rank)

    def reach(self, source: int, rank: int, port: int) -> tuple[str, int]:
        """What `source` has to connect to, in order to be connected to this port of a rank."""
        if source == rank:
            return _address(rank), port
        with socket.create_connection((_CONTROL, self.control), _LIMIT_SECONDS) as line, line.makefile("rw") as words:
            words.write(json.dumps([source, rank, port]) + "\n")
            words.flush()
            return _address(rank), int(json.loads(words.readline()))


class Relay:
    """See the module. `rate` is in bits a second, None for as fast as it goes."""

    def __init__(self, ranks: int, rate: float | None) -> None:
        if sys.platform != "linux":
            raise ValueError(f"the relay needs addresses of 127.0.0.0/8, which Linux has, and {sys.platform} has not")
        if not 1 <= ranks <= LARGEST:
            raise ValueError(f"{ranks} ranks, expected 1 to {LARGEST}")
        self._ranks, self._rate = ranks, _checked(rate)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="thinwire-relay", daemon=True)

    @property
    def links(self) -> RelayLinks:
        return RelayLinks(self._control.sockets[0].getsockname()[1], self._ranks)

    def shape(self, rate: float | None) -> None:
        """Another rate for all links."""
        self._call(self._carrier.shape, _checked(rate))

    def cut(self, rank: int) -> None:
        """Carry nothing from or to a rank any more, and tell nobody."""
        self._call(self._carrier.cut, rank)

    def drop(self, rank: int) -> None:
        """As `cut`, and reset its connections: whoever uses one is told by the operating system."""
        self._call(self._carrier.drop, rank)

    def sent_bytes(self) -> list[int]:
        """So far, by rank."""
        return list(self._carrier.sent)

    def __enter__(self) -> Self:
        self._thread.start()
        self._carrier = self._call(Carrier, [_address(rank) for rank in range(self._ranks)], self._rate)
        self._control = self._wait(asyncio.start_server(self._answer, _CONTROL, 0))
        return self

    def __exit__(self, *error: object) -> None:
        self._control.close()
        self._wait(self._carrier.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_SECONDS)
        self._loop.close()

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        """To `RelayLinks.reach`."""
        with closing(writer):
            source, rank, port = json.loads(await reader.readline())
            writer.write(f"{await self._carrier.port(source, rank, port)}\n".encode())
            await writer.drain()

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        """In the thread."""

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
