"""A small model that is trained step by step, by any method, with the bits of all that a step may change."""

import hashlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.training import SEVERAL, TOPK, loss_of, make_net, optimizer_bits, policy, sync_bits, weight_bits
from thinwire import Collective

METHODS = ("adamw gather", "adamw sharded", "adamw auto", "sgd gather", "attach gather", "attach sharded")


class Training:
    """A model of four layers between the ranks of a group, trained by one of METHODS."""

    def __init__(self, rank: int, method: str, timeout: float = 60.0) -> None:
        name, algorithm = method.split()
        options: dict[str, Any] = {"collective": Collective(algorithm=algorithm, timeout=timeout)}
        self.model, self.rank, self.ours = DistributedDataParallel(make_net(), **SEVERAL), rank, name != "attach"
        if self.ours:
            kind = {"adamw": thinwire.AdamW, "sgd": thinwire.SGD}[name]
            self.optimizer: Any = kind(self.model, lr=1e-2, compressor=policy(TOPK), warmup_steps=1, **options)
            self.sync = self.optimizer.sync
        else:
            self.sync = thinwire.attach(self.model, policy(TOPK), **options)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def take(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, self.rank, step).backward()
        if self.ours or self.sync.finite:  # torch's own would apply NaN
            self.optimizer.step()

    def bits(self) -> dict[str, bytes]:
        """Return all that a step may change. A residual of zeros is none: the first step makes them."""
        found = optimizer_bits(self.optimizer) if self.ours else weight_bits(self.model) | sync_bits(self.sync)
        return {name: bits for name, bits in found.items() if any(bits)}

    def digest(self) -> str:
        return hashlib.sha256(b"".join(weight_bits(self.model).values())).hexdigest()[:16]
