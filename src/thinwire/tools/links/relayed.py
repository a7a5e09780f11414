"""Connects gloo through a relay: every process group created in a rank's process listens and connects through it.

The ranks of a gloo group find each other through values in a store. Each rank writes the address at which it listens,
in the form of the operating system (family, port, IP). torch lets Python choose both the address to listen at and the
store. A group created here listens at the address of its rank and reads the values of its peers with the port replaced
by that of the relay. IPs do not change, because gloo lets the rank with the larger IP connect. A value that contains no
address of a peer is an error, so no connection can bypass the relay.
"""

import socket
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def connect_through(links: Any, rank: int) -> None:
    """Connect all gloo groups that this process creates from now on through the relay of these `RelayLinks`."""
    gloo: Any = dist.ProcessGroupGloo

    class RelayedGloo(gloo):  # type: ignore[misc]
        def __init__(
            self, store: Any, rank_in_group: int, size: int, timeout: timedelta = dist.default_pg_timeout
        ) -> None:
            if size != links.ranks:
                raise ValueError(f"a group of {size} ranks, expected all {links.ranks}: a relay connects all ranks")
            options = gloo._Options()
            options._timeout = timeout
            options._devices = [gloo.create_device(hostname=links.address(rank))]
            super().__init__(_RedirectingStore(store, links, rank), rank_in_group, size, options)

    dist.ProcessGroupGloo = distributed_c10d.ProcessGroupGloo = RelayedGloo  # type: ignore[misc, assignment]


class _RedirectingStore(dist.Store):  # type: ignore[name-defined, misc]
    """The store of a group that is about to connect. The addresses that it returns lead to the relay."""

    def __init__(self, store: Any, links: Any, rank: int) -> None:
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


def redirected(value: bytes, links: Any, source: int) -> bytes:
    """Return a value with the port in every address of a rank replaced by the port to which `source` connects.

    Raises RuntimeError if the value contains no address of a rank.
    """
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
            "no address of a rank in what gloo left in its store: this version of torch stores addresses in another "
            "format"
        )
    return value
