"""No DDP, any optimizer: one line between backward and step.    torchrun --nproc-per-node 2 examples/plain_loop.py"""

import torch
import torch.distributed as dist
from torch import nn

import thinwire


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks start from the same weights
    teacher, student = nn.Linear(256, 8), nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    sync = thinwire.Synchronizer(thinwire.Policy("topk:ratio=1/16,bits=2", warmup=[(20, "quantize:bits=8")]))
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(200):
        inputs = torch.randn(64, 256, generator=data)
        loss = nn.functional.mse_loss(student(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        sync.all_reduce_gradients(student.named_parameters())
        if sync.finite is not False:  # else a rank had NaN or Inf, and all ranks skip the step
            optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, reduction {sync.stats.reduction:.0f}x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
