"""gloo through a relay: in a rank's process, every group that is made listens and connects by it.

gloo's ranks find each other by values in a store, in which each writes the address that it listens at, as the operating
system keeps it (family, port, IP). torch lets Python choose both the address to listen at and the store. So a group
made here listens at its rank's own address, and reads its peers' values with the port replaced by that of the relay.
IPs stay as they are, since gloo lets the rank with the larger one connect. A value in which no peer's address is found
is an error: no connection can pass the relay by.
"""

import socket
import sys
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d


class RelayLinks(Protocol):
    """A relay, as a rank sees it."""

    @property
    def ranks(self) -> int:
        """How many there are."""

    def address(self, rank: int) -> str:
        """Return the IP address at which a rank listens."""

    def reach(self, source: int, rank: int, port: int) -> tuple[str, int]:
        """Return what `source` has to connect to, in order to be connected to this port of a rank."""


def connect_through(links: RelayLinks, rank: int) -> None:
    """From now on, in this process: torch's own groups, and those that thinwire makes beside them."""
    gloo: Any = dist.ProcessGroupGloo

    class RelayedGloo(gloo):  # type: ignore[misc]
        def __init__(
            self, store: Any, rank_in_group: int, size: int, timeout: timedelta = dist.default_pg_timeout
        ) -> None:
            if size != links.ranks:
                raise ValueError(f"a group of {size} ranks, expected all {links.ranks}: a relay knows no others")
            options = gloo._Options()
            options._timeout = timeout
            options._devices = [gloo.create_device(hostname=links.address(rank))]
            super().__init__(RedirectingStore(store, links, rank), rank_in_group, size, options)

    dist.ProcessGroupGloo = distributed_c10d.ProcessGroupGloo = RelayedGloo  # type: ignore[misc, assignment]


class RedirectingStore(dist.Store):  # type: ignore[name-defined, misc]
    """For a group that is about to connect: what it reads of its peers leads to the relay."""

    def __init__(self, store: Any, links: RelayLinks, rank: int) -> None:
        super().__init__()
        self._store, self._links, self._rank = store, links, rank

    def get(self, key: str) -> bytes:
        return redirected(bytes(self._store.get(key)), self._links, self._rank)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta = dist.default_pg_timeout) -> None:
        self._store.wait(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))


def redirected(value: bytes, links: RelayLinks, source: int) -> bytes:
    """With the port of every address of a rank replaced by the one that `source` is to connect to."""
    found = 0
    for rank in range(links.ranks):
        address = socket.inet_aton(links.address(rank))
        start = value.find(address)
        while start >= 4:
            if int.from_bytes(value[start - 4 : start - 2], sys.byteorder) == socket.AF_INET:
                _, other = links.reach(source, rank, int.from_bytes(value[start - 2 : start]))
                value = value[: start - 2] + other.to_bytes(2) + value[start:]
                found += 1
            start = value.find(address, start + 4)
    if not found:
        raise RuntimeError(
            "no address of a rank in what gloo left in its store: this torch has a form of its own for it"
        )
    return value
