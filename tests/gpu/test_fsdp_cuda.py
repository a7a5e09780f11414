"""FSDP2 on a GPU: two replicas of one shard each, over gloo; the CUDA kernels run, and replicas have the same bits."""

from typing import Any

import torch
import torch.distributed as dist
from gpu_script import run_ranks
from torch import Tensor, nn

import thinwire

STEPS = 40
TOPK = "topk:ratio=1/64,bits=2"


def worker(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("replicate", "shard"))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for kind, options in (("AdamW", {}), ("SGD", {}), ("AdamW", {"mp_policy": bf16}), ("attach", {})):
        check(rank, kind, mesh, fully_shard, options)
        if rank == 0:
            print(kind, *options, "ok", flush=True)


def check(rank: int, kind: str, mesh: Any, fully_shard: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    teacher = nn.Linear(300, 10).cuda()
    model = nn.Sequential(nn.Linear(300, 400), nn.GELU(), nn.Linear(400, 10)).cuda()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh["shard"], **options)
    optimizer: Any
    if kind == "attach":
        sync = thinwire.attach(model, TOPK, group=mesh["replicate"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    else:
        optimizer = getattr(thinwire, kind)(
            model, lr=2e-3 if kind == "AdamW" else 0.05, compressor=TOPK, group=mesh["replicate"]
        )
        sync = optimizer.sync
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(64, 300, generator=generator).cuda()
        loss = (model(inputs).float() - teacher(inputs).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert sum(losses[-5:]) < sum(losses[:5]), (kind, losses)
    kernels = {kernel for slot in sync.last_step.slots_used for kernel in slot.request.plan.first.stats.kernels}
    assert kernels == {"cuda"}, kernels
    for parameter in model.parameters():
        mine: Tensor = parameter.to_local().detach().cpu()
        theirs = mine.clone()
        dist.broadcast(theirs, src=0)
        assert torch.equal(mine, theirs), kind
    if kind != "attach":
        before = [parameter.to_local().detach().clone() for parameter in model.parameters()]
        inputs = torch.full((64, 300), torch.nan if rank == 0 else 1.0, device="cuda")
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        assert sync.stats.skipped == 1
        assert all(torch.equal(kept, now.to_local()) for kept, now in zip(before, model.parameters(), strict=True))


def test_two_replicas_of_one_shard() -> None:
    run_ranks(worker, 2)
