"""Stop and go on, also with another number of ranks.    torchrun --nproc-per-node 2 examples/resume.py FOLDER

Run it again to take 100 more steps; each rank saves its own state, since residuals and momentum differ between them.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire


def save(folder: Path, state: dict[str, object]) -> None:
    path = folder / f"rank{dist.get_rank()}.pt"
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)
    dist.barrier()


def load(folder: Path, ddp: DistributedDataParallel, optimizer: thinwire.AdamW) -> int:
    """The step to go on with. All ranks read all states: each takes its part, whatever the number of ranks was."""
    if not (folder / "rank0.pt").exists():
        return 0
    first = torch.load(folder / "rank0.pt", weights_only=True)
    states = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(first["ranks"])]
    ddp.module.load_state_dict(first["model"])
    optimizer.load_state_dict([state["optimizer"] for state in states])
    return int(first["step"])


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    teacher, student = nn.Linear(256, 8), nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8))
    ddp = DistributedDataParallel(student)
    optimizer = thinwire.AdamW(ddp, lr=1e-3)
    first = load(folder, ddp, optimizer)
    dist.barrier()  # nobody writes before all have read
    for step in range(first, first + 100):
        inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(step * 1000 + dist.get_rank()))
        loss = nn.functional.mse_loss(ddp(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = {"model": student.state_dict(), "optimizer": optimizer.state_dict(), "ranks": dist.get_world_size()}
    save(folder, {**state, "step": first + 100})
    if dist.get_rank() == 0:
        print(f"steps {first + 1} to {first + 100}, loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
