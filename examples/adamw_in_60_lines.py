"""thinwire.AdamW in plain torch: top-k with error feedback, the exchange of two ranks, and c of second moments."""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

CHUNK, KEPT, WORLD, WARMUP, BETA2, LARGEST = 256, 8, 2, 2, 0.999, 2 * 0.5 / 0.001**0.5


def average(tensor: Tensor) -> Tensor:
    dist.all_reduce(total := tensor.clone())
    return total / WORLD


def exchange(update: Tensor, residual: Tensor) -> Tensor:
    """Send the largest elements of each chunk, and average those of all ranks; the residual keeps all others."""
    chunks = residual.add_(update).view(-1, CHUNK)
    places = chunks.abs().topk(KEPT).indices
    payload = torch.stack([places.float(), chunks.gather(1, places)])
    chunks.scatter_(1, places, 0.0)
    dist.all_gather(payloads := [torch.empty_like(payload) for _ in range(WORLD)], payload)
    return torch.stack([torch.zeros_like(chunks).scatter(1, at.long(), sent) for at, sent in payloads]).mean(0)


@torch.no_grad()
def step(number: int, grads: tuple[Tensor, ...], state: list[list[Tensor]], lr: float, decay: float = 1e-2) -> None:
    beta1 = 0.9 if number <= WARMUP else 0.5  # a residual delays an element, as momentum does
    first = 1 - 0.9 ** min(number, WARMUP) * 0.5 ** max(number - WARMUP, 0)  # Adam's bias correction
    for own, (p, m, v, residual, c) in zip(grads, state, strict=True):
        p.mul_(1 - lr * decay)
        if number <= WARMUP:  # torch's AdamW, with the averaged gradient
            mean = average(own)
            v.lerp_(mean**2, 1 - BETA2)
            p.sub_(lr * m.lerp_(mean, 1 - beta1) / first / ((v / (1 - BETA2**number)).sqrt() + 1e-8))
        else:  # an update from this rank's gradient and moments is compressed, and all ranks apply the average
            update = m.lerp_(own, 1 - beta1) / first / ((v / (1 - BETA2 ** (number - 1))).sqrt() + 1e-8)
            v.lerp_(own**2, 1 - BETA2)
            p.sub_(lr / c.sqrt() * exchange(update.clamp_(-LARGEST, LARGEST), residual).view_as(p))
        if number == WARMUP:  # from now on v has this rank's own gradients, whose squares are 1 / c times as large
            c.copy_(((mean**2).mean() / average((own**2).mean())).clamp(1 / WORLD, 1))
            v.clamp_(min=1e-4 * float(v.mean())).div_(c)


def main(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    torch.manual_seed(rank)
    state = [[weights := nn.Parameter(torch.zeros(64, 64)), *torch.zeros(3, 64, 64), torch.ones(1)]]
    for number in range(1, 201):
        loss = (torch.randn(32, 64) @ (weights - torch.eye(64))).square().mean()
        step(number, torch.autograd.grad(loss, [weights]), state, lr=0.01)
    print(f"rank {rank}: loss {loss:.4f} after {number} steps of {CHUNK / KEPT / 2:.0f} times fewer bytes\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(main, args=(f"{folder}/rendezvous",), nprocs=WORLD)
