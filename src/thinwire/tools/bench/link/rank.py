"""Runs on each rank: enters the link, joins the process group and takes timed steps."""

import gc
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn import functional as F

from thinwire.tools.links import Links

from ..methods import parse
from ..training import Setup, Training, build
from . import models
from .settings import Model
from .timeline import Marks, Timeline, recorded, timeline


class LinkRank:
    """A rank behind a link.

    timeout   time limit of any exchange in seconds.
    """

    def __init__(self, rank: int, size: int, links: Links, timeout: float) -> None:
        self._rank, self._size, self._links, self._timeout = rank, size, links, timedelta(seconds=timeout)
        links.enter(rank)
        # The time is measured here, and not the loss.
        warnings.filterwarnings("ignore", ".*AdamW on gradients compressed by")
        self._store: TCPStore | None = None
        self._training: Training | None = None

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

    def start(self, name: str, model: Model) -> None:
        """Build the model and start to train it by the method of this name."""
        self._training = None
        gc.collect()
        torch.manual_seed(0)
        # All ranks have the same weights. Sending them would take longer than the steps.
        self._training = build(parse(name), Setup(models.build(model), lr=1e-5, ddp={"init_sync": False}))
        torch.manual_seed(1 + self._rank)
        self._batch = models.batch(model)

    def warm_up(self, count: int) -> float:
        """Take `count` steps, then more until "auto" has chosen, and return the milliseconds of the last step.

        "auto" chooses at the same step on all ranks.
        """
        assert self._training is not None
        sync, taken = self._training.sync, self.steps(count)
        while sync is not None and sync.policy.auto and sync.choice is None:
            taken = self.steps(1)
        return taken[-1]

    def steps(self, count: int) -> list[float]:
        """Take `count` steps and return the milliseconds of each."""
        assert self._training is not None
        marks = [self._step(self._training) for _ in range(count)]
        return [1e3 * (one.end - one.begin) for one in marks]

    def timeline(self) -> Timeline | None:
        """Take one more step, which all ranks begin together, and return its timeline.

        Return None for methods that record nothing.
        """
        assert self._training is not None
        sync = self._training.sync
        if sync is None:
            self._step(self._training)
            return None
        dist.barrier()
        marks = self._step(self._training)
        found = recorded(sync)
        return None if found is None else timeline(marks, found)

    def _step(self, training: Training) -> Marks:
        begin = time.perf_counter()
        training.optimizer.zero_grad()
        loss = F.mse_loss(training.module(self._batch), torch.zeros(()).expand_as(self._batch))
        backward = time.perf_counter()
        loss.backward()
        optimizer = time.perf_counter()
        training.optimizer.step()
        return Marks(begin=begin, backward=backward, optimizer=optimizer, end=time.perf_counter())
