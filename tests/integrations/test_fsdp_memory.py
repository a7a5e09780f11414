"""Memory of a rank beyond FSDP with torch's optimizer."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from support.sharded import SECONDS, local_parts, make_mesh, shard
from thinwire.testing import RankPool


def use_memory(rank: int, world_size: int, kind: str) -> float:
    """Peak of memory in a step, in copies of this rank's parameters; all that is loaded once is loaded before."""
    for width in (128, 2048):
        mesh = make_mesh(world_size, 2)
        gc.collect()
        base = resident("VmRSS")
        model = shard(nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]), mesh)
        if kind == "torch":
            optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
        else:
            optimizer = thinwire.AdamW(model, group=mesh["replicate"], warmup_steps=2)
        given = torch.randn(4, width)
        for step in range(6):
            if step == 3:
                Path("/proc/self/clear_refs").write_text("5")
            optimizer.zero_grad()
            model(given).square().mean().backward()
            optimizer.step()
        peak = resident("VmHWM") - base
    return peak / sum(part.nbytes for part in local_parts(model).values())


def resident(kind: str) -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(kind))


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs /proc")
def test_memory_beyond_torch_is_one_residual_and_scratch() -> None:
    with RankPool() as first, RankPool() as second:
        torchs = max(first.run(use_memory, 4, "torch", timeout=2 * SECONDS))
        ours = max(second.run(use_memory, 4, "thinwire", timeout=2 * SECONDS))
    print(f"\ntorch {torchs:.2f}, thinwire {ours:.2f} copies of the shard's parameters")
    assert 0.8 < ours - torchs < 1.8
