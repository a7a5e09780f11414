"""Each rank trains alone, and ranks exchange now and then.    torchrun --nproc-per-node 2 examples/local_steps.py"""

import torch
import torch.distributed as dist
from torch import nn

import thinwire

STEPS, EVERY = 320, 16


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks start from the same weights
    teacher, student = nn.Linear(256, 8), nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8))
    inner = torch.optim.AdamW(student.parameters(), lr=1e-3)
    optimizer = thinwire.LocalSteps(inner, every=EVERY, delay=EVERY // 2, model=student)
    data = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank has batches of its own
    for step in range(STEPS):
        inputs = torch.randn(64, 256, generator=data)
        loss = nn.functional.mse_loss(student(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # every 16th begins an exchange, which is under way during the next 8
        if dist.get_rank() == 0 and (step + 1) % 80 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {optimizer.sync.stats.bytes_sent / 1e3:.1f} kB sent")
    optimizer.synchronize()  # all ranks have the same weights now, for an evaluation or a file
    if dist.get_rank() == 0:
        print(f"reduction {optimizer.sync.stats.reduction:.0f}x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
