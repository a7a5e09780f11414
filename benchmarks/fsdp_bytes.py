"""Bytes between replicas of a sharded model beside those of DDP with as many replicas, from the interface counter.

    python benchmarks/fsdp_bytes.py [REPLICASxSHARDS ...]      # such as 2x2 2x4; needs root and iproute2

Each replica has a network namespace. Its ranks exchange shards over its loopback interface, and replicas over links
between the namespaces, whose interfaces count. A count is that of the steps after the warm-up, per rank.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.testing.pool import Workers
from thinwire.tools.links.lab import Lab, Links

WIDTH, LAYERS, WARMUP, STEPS = 2048, 2, 4, 10
TIMEOUT = 120.0


class Shared(NamedTuple):
    """Links of replicas. All ranks of a replica are behind one."""

    links: Links
    shards: int

    def enter(self, rank: int) -> None:
        self.links.enter(rank // self.shards)

    def address(self, rank: int) -> str:
        return self.links.address(rank // self.shards)

    def reach(self, source: int, rank: int, port: int) -> tuple[str, int]:
        return self.links.reach(source // self.shards, rank // self.shards, port)


class Rank:
    """A rank of a sharded model; without shards, a rank of DDP."""

    def __init__(self, rank: int, size: int, shards: int) -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        group = None
        if shards == 1:
            model = DistributedDataParallel(model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard"))
            for part in (*model, model):
                fully_shard(part, mesh=mesh["shard"])
            group = mesh["replicate"]
        self._model, self._optimizer = model, thinwire.AdamW(model, group=group, warmup_steps=WARMUP)
        torch.manual_seed(1 + rank)

    def steps(self, count: int) -> int:
        """Take steps, and return the bytes that this rank has sent in them as it counts itself."""
        before = self._optimizer.sync.stats.bytes_sent
        for _ in range(count):
            self._optimizer.zero_grad()
            self._model(torch.randn(8, WIDTH)).square().mean().backward()
            self._optimizer.step()
        return int(self._optimizer.sync.stats.bytes_sent - before)


def measure(replicas: int, shards: int) -> tuple[float, float]:
    """Return kB per step and rank between replicas: on the interfaces, and as the ranks count."""
    size = replicas * shards
    with Lab(replicas, None) as lab, Workers(size, limit=TIMEOUT, links=Shared(lab.links, shards)) as workers:
        workers.form(size, Rank, shards)
        workers.ask("steps", 2 * WARMUP)
        before = sum(lab.sent_bytes())
        counted = sum(workers.ask("steps", STEPS))
        sent = sum(lab.sent_bytes()) - before
    return sent / size / STEPS / 1e3, counted / size / STEPS / 1e3


def main(shapes: list[str]) -> None:
    """Print a line for DDP and for each shape."""
    ddp: dict[int, float] = {}
    parameters = LAYERS * WIDTH * (WIDTH + 1)
    print(f"{parameters:,} parameters, thinwire.AdamW, kB/step per rank between replicas, mean of {STEPS} steps")
    for shape in shapes or ["2x2", "2x4", "4x2"]:
        replicas, shards = map(int, shape.split("x"))
        if replicas not in ddp:
            ddp[replicas], counted = measure(replicas, 1)
            print(f"{replicas} replicas, DDP        interface {ddp[replicas]:8.2f}  stats {counted:8.2f}", flush=True)
        sent, counted = measure(replicas, shards)
        print(
            f"{replicas} replicas, {shards} shards   interface {sent:8.2f}  stats {counted:8.2f}  "
            f"x {shards} / DDP = {sent * shards / ddp[replicas]:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
