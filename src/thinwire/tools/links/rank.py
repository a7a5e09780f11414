"""A rank behind a link: it enters the link and forms the process group through it."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from . import Links


class RankBehindLink:
    """A rank whose traffic goes through its link. `host` is called on all ranks, then `join` with what rank 0 returned.

    timeout   time limit of any exchange in seconds.
    """

    def __init__(self, rank: int, size: int, links: Links, timeout: float) -> None:
        self._rank, self._size, self._links, self._timeout = rank, size, links, timedelta(seconds=timeout)
        links.enter(rank)
        self._store: TCPStore | None = None

    def host(self) -> int:
        """Start the store on rank 0 and return its port. Return 0 on all other ranks."""
        if self._rank:
            return 0
        self._store = TCPStore(self._links.address(0), 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return int(self._store.port)

    def join(self, port: int) -> None:
        """Connect to the store of rank 0 and create the process group."""
        host, port = self._links.reach(self._rank, 0, port)
        store = self._store or TCPStore(host, port, is_master=False, timeout=self._timeout)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size, timeout=self._timeout)
