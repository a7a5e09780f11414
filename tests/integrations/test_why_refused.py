"""What ordinary scripts get wrong with DDP: the error names the cause that is the likeliest for what is there."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.training import make_net, policy, raises
from thinwire.collectives import CollectiveError
from thinwire.testing import RankPool

TOPK = "topk:ratio=1/16,bits=2,chunk=512"


class WithUnused(nn.Module):
    """A net with a layer that its forward pass leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused = make_net(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def a_step(rank: int, kind: str) -> None:
    net = WithUnused() if kind == "unused" else make_net()
    if kind == "frozen before":
        next(net.parameters()).requires_grad_(False)
    ddp = DistributedDataParallel(net)
    if kind == "hook":
        thinwire.attach(ddp, "quantize:bits=8")
        with raises(ValueError, "has a communication hook already", "thinwire.attach"):
            thinwire.AdamW(ddp, compressor=policy(TOPK))
        return
    optimizer = thinwire.AdamW(ddp, compressor=policy(TOPK))
    data = torch.ones(4, 32)
    if kind == "frozen before":
        with ddp.no_sync():
            ddp(data).square().mean().backward()
        with raises(RuntimeError, "neither it nor its forward pass under no_sync()"):
            optimizer.step()
        return
    if kind == "no_sync":
        loss = ddp(data).square().mean()
        with ddp.no_sync():
            loss.backward()
        with raises(RuntimeError, "a second exchange before step()", "no_sync() around forward and backward"):
            ddp(data).square().mean().backward()
        return
    if kind == "frozen":
        ddp(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        next(ddp.module.parameters()).requires_grad_(False)
    ddp(data).square().mean().backward()
    expected = {
        "unused": ("DDP waits for the gradient of 'unused.weight', 'unused.bias'", "find_unused_parameters=True"),
        "frozen": ("DDP waits for '0.weight', frozen after DistributedDataParallel(...)", "freeze before that"),
    }
    with raises(RuntimeError, "no gradients were exchanged", *expected[kind]):
        optimizer.step()


def every_kind(rank: int, world_size: int) -> None:
    for kind in ("unused", "frozen", "frozen before", "no_sync", "hook"):
        a_step(rank, kind)
        dist.barrier()


def test_the_likeliest_cause_is_named(ranks: RankPool) -> None:
    ranks.run(every_kind, 2)


def consolidate_on_rank_0(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(make_net())
    optimizer = thinwire.AdamW(ddp, compressor=policy(TOPK), timeout=3)
    ddp(torch.ones(4, 32)).square().mean().backward()
    optimizer.step()
    text = ""
    if rank == 0:
        try:
            optimizer.consolidate_state_dict()
        except CollectiveError as error:
            text = "\n".join([str(error), *error.__notes__])
    dist.barrier()
    return text


def test_states_that_one_rank_alone_consolidates(ranks: RankPool) -> None:
    text = ranks.run(consolidate_on_rank_0, 2)[0]
    assert "rank 1 is late" in text
    assert "All ranks call consolidate_state_dict(): it must not stand behind `if rank == 0`." in text
