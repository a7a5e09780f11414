"""Ranks behind links: each enters its link and forms the process group through it.

    with network(2, 100e6, relay=False) as net, Workers(2) as workers:
        form(workers, net.links, 2, RankClass, *args, timeout=60.0)     # as workers.form(2, RankClass, *args)

Calls of the ranks then go through `workers.ask`, as without links.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from thinwire.testing.processes import loopback_store
from thinwire.tools.workers import Workers

from . import Links


def form(
    workers: Workers, links: Links, size: int, rank_class: Callable[..., object], *args: object, timeout: float
) -> None:
    """Form a process group through the links, and build `rank_class(rank, size, *args)` on each rank.

    timeout   time limit of any exchange in seconds.
    """
    workers.make(size, _BehindLink, links, timeout)
    workers.ask("join", workers.ask("host")[0])
    workers.ask("build", rank_class, args)


class LinkedWorkers:
    """`Workers` whose groups are formed through links.

    timeout   time limit of any exchange in seconds.
    """

    def __init__(self, workers: Workers, links: Links, timeout: float) -> None:
        self._workers, self._links, self._timeout = workers, links, timeout

    def form(self, size: int, rank_class: Callable[..., object], *args: object) -> None:
        """Form a process group through the links, and build `rank_class(rank, size, *args)` on each rank."""
        form(self._workers, self._links, size, rank_class, *args, timeout=self._timeout)

    def ask(self, method: str, *args: object) -> list[Any]:
        """Call a method on every rank and return the results, ordered by rank."""
        return self._workers.ask(method, *args)


class _BehindLink:
    """A rank whose traffic goes through its link. It has the methods of what was built on it, too."""

    def __init__(self, rank: int, size: int, links: Links, timeout: float) -> None:
        self._rank, self._size, self._links, self._timeout = rank, size, links, timedelta(seconds=timeout)
        links.enter(rank)
        self._store: TCPStore | None = None
        self._built: object = None

    def host(self) -> int:
        """Start the store on rank 0 and return its port. Return 0 on all other ranks."""
        if self._rank:
            return 0
        self._store = loopback_store(self._timeout, self._links.address(0))
        return int(self._store.port)

    def join(self, port: int) -> None:
        """Connect to the store of rank 0 and create the process group."""
        host, port = self._links.reach(self._rank, 0, port)
        store = self._store or TCPStore(host, port, is_master=False, timeout=self._timeout)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size, timeout=self._timeout)

    def build(self, rank_class: Callable[..., object], args: tuple[object, ...]) -> None:
        """Build the object whose methods are called from now on."""
        self._built = rank_class(self._rank, self._size, *args)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._built, method)
