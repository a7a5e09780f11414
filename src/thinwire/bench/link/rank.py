"""A rank in the lab: enters its namespace, joins the others over the links, and takes timed steps."""

import gc
import os
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn import functional as F

from .lab import Links, sent_bytes
from .models import Model
from .ways import WAYS, Way

TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Taken:
    """Steps of one way on one rank."""

    milliseconds: list[float]
    bytes_per_step: float
    """By the counter of the interface, headers included."""


class LinkRank:
    def __init__(self, rank: int, size: int, links: Links) -> None:
        self._rank, self._size, self._links = rank, size, links
        links.enter(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        warnings.filterwarnings(
            "ignore", ".*AdamW on gradients compressed by"
        )  # the time of it is asked for, not the loss
        self._store: TCPStore | None = None
        self._way: Way | None = None

    def host(self) -> int:
        """Rank 0 hosts the store; its port."""
        if self._rank:
            return 0
        self._store = TCPStore(self._links.address(0), 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return int(self._store.port)

    def join(self, port: int) -> None:
        store = self._store or TCPStore(self._links.address(0), port, is_master=False, timeout=TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size, timeout=TIMEOUT)

    def start(self, way: str, model: Model) -> None:
        self._way = None
        gc.collect()
        torch.manual_seed(0)
        self._way = WAYS[way](model.build())
        torch.manual_seed(1 + self._rank)
        self._batch = model.batch()

    def steps(self, count: int) -> Taken:
        """Take so many steps; each begins when all ranks are there."""
        assert self._way is not None
        taken, before = [], sent_bytes()
        for _ in range(count):
            started = time.perf_counter()
            self._step(self._way)
            taken.append(1e3 * (time.perf_counter() - started))
        return Taken(taken, (sent_bytes() - before) / count)

    def _step(self, way: Way) -> None:
        way.optimizer.zero_grad()
        loss = F.mse_loss(way.module(self._batch), torch.zeros(()).expand_as(self._batch))
        loss.backward()
        way.after_backward()
        way.optimizer.step()
