"""Memory of `consolidate_state_dict` and of loading its file, in copies of the float32 parameters.

    python benchmarks/consolidate_memory.py --ranks 4 --numel 16e6

Prints for rank 0, which gathers, and for rank 1: what is held after the call, and the most while it runs, both without
what was there before. On Linux only, by resident memory.
"""

import argparse
import gc
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.testing import RankPool


def resident(field: str) -> int:
    """Bytes of resident memory: VmRSS now, VmHWM the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


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
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    optimizer.consolidate_state_dict()
    found["held"], found["most"] = resident("VmRSS") - before, resident("VmHWM") - before
    if rank == 0:
        torch.save(optimizer.state_dict(), path)
    dist.barrier()
    for mmap in (True, False):
        other = thinwire.AdamW(model, lr=1e-3, warmup_steps=1)
        gc.collect()
        before = resident("VmRSS")
        forget_peak()
        other.load_state_dict(torch.load(path, mmap=mmap, weights_only=True))
        found[f"load mmap={mmap}"] = resident("VmHWM") - before
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
