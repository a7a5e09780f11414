"""A step that failed, or is over, leaves nothing behind: DDP goes on, and no gradient is kept."""

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.training import make_net, policy, raises, train, weight_bits
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

    train(ddp, optimizer, rank, 0, 2)
    before = weight_bits(ddp)
    if rank == 1:
        GlooLink.post = breaks  # type: ignore[method-assign]
    with raises(thinwire.CollectiveError, "rank"):
        train(ddp, optimizer, rank, 2, 3)
    assert weight_bits(ddp) == before
    if kind == "attach":  # some would be averages, and others this rank's own
        assert all(bool(parameter.grad.isnan().all()) for parameter in ddp.parameters())
    store_barrier("both have failed", world_size)
    train(ddp, optimizer, rank, 3, 6)
    return weight_bits(ddp)


@pytest.mark.parametrize("kind", ["attach", "SGD"])
def test_ddp_goes_on_after_an_exchange_that_failed(ranks: RankPool, kind: str) -> None:
    first, second = ranks.run(break_once, 2, kind, timeout=40)
    assert first == second


def keep_nothing(rank: int, world_size: int, ddp: bool) -> None:
    model: Any = DistributedDataParallel(make_net()) if ddp else make_net()
    optimizer = thinwire.AdamW(model, lr=1e-3, compressor=policy(TOPK), warmup_steps=1)
    train(model, optimizer, rank, 0, 3)
    left = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    optimizer.zero_grad()
    gc.collect()
    assert [gradient() for gradient in left] == [None] * len(left), "a gradient is kept after a step"
    left = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer.sync)]
    del model, optimizer
    end = time.monotonic() + 20
    while any(reference() is not None for reference in left):
        assert time.monotonic() < end, "the model or its optimizer is kept"
        gc.collect()  # a thread of the last exchange may be about to let go
        time.sleep(0.01)


def test_gradients_models_and_optimizers_can_be_freed(ranks: RankPool) -> None:
    for ddp in (False, True):
        ranks.run(keep_nothing, 2, ddp)
