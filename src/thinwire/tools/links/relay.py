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
import sys
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from thinwire.tools.loopback import Counter

from . import LARGEST_WORLD, check_round_trip
from .carrier import FASTEST, Carrier

T = TypeVar("T")
_NETWORK = "127.83.0"
_CONTROL = "127.0.0.1"
_LIMIT_SECONDS = 30.0


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

    ranks        number of ranks.
    rate         rate of each link in bits per second. None means no limit.
    round_trip   seconds until the answer to a byte to another rank arrives, besides the time at the rate.
    """

    def __init__(self, ranks: int, rate: float | None, round_trip: float = 0.0) -> None:
        if sys.platform != "linux":
            raise ValueError(f"the relay needs addresses of 127.0.0.0/8, which Linux has, and {sys.platform} has not")
        if not 1 <= ranks <= LARGEST_WORLD:
            raise ValueError(f"{ranks} ranks, expected 1 to {LARGEST_WORLD}")
        self._ranks, self._rate, self._round_trip = ranks, _checked(rate), check_round_trip(round_trip)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="thinwire-relay", daemon=True)

    @property
    def links(self) -> RelayLinks:
        """Return the part that is sent to the process of each rank."""
        return RelayLinks(self._control.sockets[0].getsockname()[1], self._ranks)

    def shape(self, rate: float | None, round_trip: float = 0.0) -> None:
        """Set the rate and the round-trip time of all links."""
        self._call(self._carrier.shape, _checked(rate), check_round_trip(round_trip) / 2)

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
        addresses = [_address(rank) for rank in range(self._ranks)]
        self._carrier = self._call(Carrier, addresses, self._rate, self._round_trip / 2)
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
