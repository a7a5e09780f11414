"""Memory of `consolidate_state_dict` and of loading its file, in copies of the float32 parameters.

    python benchmarks/consolidate_memory.py --ranks 4 --numel 16e6

Prints for rank 0, which gathers, and for rank 1: what is held after the call, and the most while it runs, both without
what was there before. On Linux only, by resident memory.
"""

import argparse
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.testing import RankPool
from thinwire.tools.bench.measure import peak_resident


def memory_of(job: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that are held after a job, and the most while it runs, beyond those before."""
    gc.collect()
    before = peak_resident(lambda: None)
    most = peak_resident(job)
    return peak_resident(lambda: None) - before, most - before


def measure(rank: int, world_size: int, numel: int, path: str) -> dict[str, float]:
    model = nn.ParameterList([nn.Parameter(torch.zeros(numel // 4)) for _ in range(4)])
    optimizer = thinwire.AdamW(model, lr=1e-3, warmup_steps=1)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        for parameter in model:
            parameter.grad = torch.randn(parameter.numel(), generator=generator)
        optimizer.step()
    optimizer.zero_grad()
    found = {}
    found["held"], found["most"] = memory_of(optimizer.consolidate_state_dict)
    if rank == 0:
        torch.save(optimizer.state_dict(), path)
    dist.barrier()
    for mmap in (True, False):
        other = thinwire.AdamW(model, lr=1e-3, warmup_steps=1)

        def load(other: thinwire.AdamW = other, mmap: bool = mmap) -> None:
            other.load_state_dict(torch.load(path, mmap=mmap, weights_only=True))

        _, found[f"load mmap={mmap}"] = memory_of(load)
    found["file"] = Path(path).stat().st_size
    return {name: nbytes / (4 * numel) for name, nbytes in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--numel", type=float, default=16e6)
    options = parser.parse_args()
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        rows = pool.run(measure, options.ranks, int(options.numel), f"{folder}/state.pt")
    for rank in range(2):
        print(f"rank {rank}:", ", ".join(f"{name} {copies:.1f}" for name, copies in rows[rank].items()))


if __name__ == "__main__":
    main()
