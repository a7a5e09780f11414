"""A step that failed, or is over, leaves nothing behind: DDP goes on, and no gradient is kept."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.training import loss_of, make_net, policy, raises, weight_bits
from thinwire.collectives.transport.link import GlooLink, LinkBroken
from thinwire.testing import RankPool, store_barrier

TOPK = "topk:ratio=1/8,bits=4,chunk=512"


def break_once(rank: int, world_size: int, kind: str) -> Any:
    """The link of rank 1 breaks in the third step: it is an error on both ranks, and the steps after it are fine."""
    ddp = DistributedDataParallel(make_net(), bucket_cap_mb=0.01)
    if kind == "attach":
        thinwire.attach(ddp, policy(TOPK))
        optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.01)
    else:
        optimizer = thinwire.SGD(ddp, lr=0.01, compressor=policy(TOPK))
    post = GlooLink.post

    def breaks(*args: Any, **options: Any) -> Any:
        GlooLink.post = post  # type: ignore[method-assign]
        raise LinkBroken(0, False, "the wire is cut")

    for step in range(6):
        optimizer.zero_grad()
        if step == 2:
            before = weight_bits(ddp)
            if rank == 1:
                GlooLink.post = breaks  # type: ignore[method-assign]
            with raises(thinwire.CollectiveError, "rank"):
                loss_of(ddp, rank, step).backward()
                optimizer.step()
            assert weight_bits(ddp) == before
            if kind == "attach":  # some would be averages, and others this rank's own
                assert all(bool(parameter.grad.isnan().all()) for parameter in ddp.parameters())
            store_barrier("both have failed", world_size)
            continue
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    return weight_bits(ddp)


@pytest.mark.parametrize("kind", ["attach", "SGD"])
def test_ddp_goes_on_after_an_exchange_that_failed(ranks: RankPool, kind: str) -> None:
    first, second = ranks.run(break_once, 2, kind, timeout=40)
    assert first == second


def keep_nothing(rank: int, world_size: int, ddp: bool) -> None:
    model: Any = DistributedDataParallel(make_net()) if ddp else make_net()
    optimizer = thinwire.AdamW(model, lr=1e-3, compressor=policy(TOPK), warmup_steps=1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    optimizer.zero_grad()
    gc.collect()
    assert [gradient() for gradient in gradients] == [None] * len(gradients)


def test_no_gradient_is_kept_after_a_step(ranks: RankPool) -> None:
    for ddp in (False, True):
        ranks.run(keep_nothing, 2, ddp)
