"""The training by a loop with DDP.    torchrun --nproc-per-node 2 plain.py FOLDER STEPS"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.frameworks.task import OPTIONS, Net, batches, save, write


def train(rank: int, world_size: int, folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    whole = _train(folder, steps, resume=False)
    dist.barrier()
    _train(folder, steps, resume=True)
    write(folder, whole)


def _train(folder: Path, steps: int, resume: bool) -> dict[str, Any]:
    net = Net()
    ddp = DistributedDataParallel(net)
    optimizer = thinwire.AdamW(ddp, **OPTIONS)
    first = 0
    if resume:
        saved = torch.load(folder / f"{steps // 2}.pt", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = steps // 2
    for step, batch in enumerate(batches(first, steps), first + 1):
        optimizer.zero_grad()
        ddp(**batch)["loss"].backward()
        optimizer.step()
        if step in (steps // 2, steps):
            optimizer.consolidate_state_dict()
            if dist.get_rank() == 0:
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, folder / f"{step}.pt")
    save(folder, "whole-resumed" if resume else "whole", ddp)
    return {"bytes": optimizer.sync.stats.bytes_sent}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size(), Path(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()
