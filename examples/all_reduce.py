"""A compressed all-reduce between two processes on this machine, beside a dense one: the bytes, and what is lost."""

import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import thinwire

WORLD, NUMEL, STEPS, SPEC = 2, 25_000_000, 10, "topk:ratio=1/64,bits=2"


def loopback_megabytes(exchange: Callable[[], object]) -> float:
    """What the loopback interface carries for one exchange, per rank; Linux counts it, elsewhere NaN."""
    counter, sent = Path("/proc/net/dev"), [math.nan, math.nan]
    for i, action in enumerate((exchange, dist.barrier)):
        dist.barrier()
        if counter.exists() and (line := re.search(r"lo:(.*)", counter.read_text())):
            sent[i] = int(line[1].split()[8])
        action()
    return (sent[1] - sent[0]) / WORLD / 1e6


def worker(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    dense, thin, residual, applied = gradient.clone(), gradient.clone(), torch.zeros(NUMEL), torch.zeros(NUMEL)
    compressor = thinwire.compressor(SPEC)
    dense_mb = loopback_megabytes(lambda: dist.all_reduce(dense))
    for _ in range(STEPS):
        thin.copy_(gradient)
        thin_mb = loopback_megabytes(
            lambda: thinwire.all_reduce_compressed(thin, compressor, residual, op=dist.ReduceOp.AVG)
        )
        applied += thin
    dist.all_gather(replicas := [torch.empty_like(applied) for _ in range(WORLD)], applied)
    dist.all_reduce(residual)
    lost = (applied + residual / WORLD - STEPS / WORLD * dense).norm() / (STEPS / WORLD * dense).norm()
    if rank == 0:
        print(f"{WORLD} processes, {NUMEL:,} float32 each, {SPEC}, kernels {', '.join(compressor.stats.kernels)}")
        print(f"dense all-reduce    {dense_mb:8.2f} MB on the wire per rank and step")
        print(f"compressed          {thin_mb:8.2f} MB, {dense_mb / thin_mb:.0f} times less")
        print(f"replicas identical  {all(torch.equal(applied, replica) for replica in replicas)}")
        print(f"lost in {STEPS} steps    {lost:.0e} of the sum: what was not sent is kept in the residual")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, args=(f"{folder}/rendezvous",), nprocs=WORLD)
