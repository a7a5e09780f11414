"""DDP with an optimizer that compresses its update.    torchrun --nproc-per-node 2 examples/ddp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

STEPS = 200


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    teacher, student = nn.Linear(256, 8), nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8))
    ddp = DistributedDataParallel(student)
    optimizer = thinwire.AdamW(ddp, lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank has batches of its own
    for step in range(STEPS):
        inputs = torch.randn(64, 256, generator=data)
        loss = nn.functional.mse_loss(ddp(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()  # exchanges updates while it goes on
        optimizer.step()
        schedule.step()
        if dist.get_rank() == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, reduction {optimizer.sync.stats.reduction:.0f}x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
