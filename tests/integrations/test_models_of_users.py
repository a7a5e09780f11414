"""Models and loops as people have them: another memory format, odd loops, links that break, models that come and go."""

import gc
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.training import TOPK, loss_of, make_net, policy, raises, seeded, train, weight_bits
from thinwire.collectives.transport.link import GlooLink, LinkBroken
from thinwire.testing import RankPool, store_barrier


def make_convolution(memory_format: torch.memory_format) -> nn.Module:
    with seeded(0):
        net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 24, 3), nn.Flatten(), nn.Linear(384, 4))
    return net.to(memory_format=memory_format)


def convolve(rank: int, world_size: int, ddp: bool, kind: str) -> float:
    """How far apart training ends in the two memory formats, when everything is sent."""
    ends = []
    # c of AdamW is measured on a sample in the order of the memory, which is what differs here.
    more = {"refresh_every": 0} if kind == "AdamW" else {}
    for memory_format in (torch.contiguous_format, torch.channels_last):
        net = make_convolution(memory_format)
        model: Any = DistributedDataParallel(net) if ddp else net
        optimizer = getattr(thinwire, kind)(
            model, lr=1e-2, weight_decay=0.1, compressor=policy("topk:ratio=1"), warmup_steps=3, warmup="none", **more
        )
        for step in range(8):
            images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(images.to(memory_format=memory_format)).square().mean().backward()
            optimizer.step()
        ends.append(torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()]))
    return float((ends[0] - ends[1]).abs().max())


@pytest.mark.parametrize(("ddp", "kind"), [(True, "AdamW"), (False, "SGD")])
def test_channels_last_is_the_same_training(ranks: RankPool, ddp: bool, kind: str) -> None:
    for apart in ranks.run(convolve, 2, ddp, kind):
        assert apart < 1e-4


def odd_loops(rank: int, world_size: int) -> None:
    """step() left out; gradients averaged before, as by a wrapper that is no DDP; join(); checkpoints of two steps."""
    ddp = DistributedDataParallel(make_net())
    optimizer = thinwire.SGD(ddp, lr=0.1, compressor=policy(TOPK))
    train(ddp, optimizer, rank, 0, 1)
    loss_of(ddp, rank, 1).backward()
    train(ddp, optimizer, rank, 2, 4)
    assert optimizer._count == 3
    with raises(RuntimeError, "join"), ddp.join():
        train(ddp, optimizer, rank, 4, 5)

    model = make_net()
    optimizer = thinwire.SGD(model.parameters(), lr=0.1, compressor=policy(TOPK))
    loss_of(model, rank, 0).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("give the DDP model itself" in str(one.message) for one in caught), caught
    with raises(ValueError, "DDP model inside"):
        thinwire.SGD(nn.Sequential(DistributedDataParallel(make_net())), lr=0.1)

    states, model = [], make_net()
    optimizer = thinwire.SGD(model, lr=0.1, compressor=policy(TOPK))
    for step in range(3):
        train(model, optimizer, rank, step, step + 1)
        states.append(optimizer.state_dict())
    optimizer = thinwire.SGD(model, lr=0.1, compressor=policy(TOPK))
    optimizer.load_state_dict(states[2 - rank])  # as when a job is killed while it saves
    with raises(ValueError, "different steps", "rank 0 at 3", "rank 1 at 2"):
        train(model, optimizer, rank, 3, 4)


def test_odd_loops_go_on_or_are_noticed(ranks: RankPool) -> None:
    ranks.run(odd_loops, 2)


def end_without_residuals(rank: int, world_size: int) -> float:
    """Two nodes of two: what was kept under other buckets must be sent, too."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    sync = thinwire.Synchronizer(policy("topk:ratio=1/4,chunk=512"), group=(inside, between))
    model = make_net()
    loss_of(model, rank, 0).backward()
    sync.all_reduce_gradients(model.named_parameters())
    assert sync.residual_norm() > 0
    for _ in range(40):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        sync.all_reduce_gradients(reversed(list(model.named_parameters())))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert sync.stats.bytes_dense_between_nodes == 41 * nbytes // 2, "a ring of two nodes, of half the gradient each"
    assert sync.stats.bytes_inside_nodes + sync.stats.bytes_between_nodes == sync.stats.bytes_sent
    assert 0.9 * 41 * nbytes < sync.stats.bytes_inside_nodes < 1.1 * 41 * nbytes, "dense, by two ranks"
    assert sync.stats.reduction_between_nodes > 2 > sync.stats.reduction
    return sync.residual_norm()


def test_nothing_is_stranded_between_nodes(ranks: RankPool) -> None:
    for norm in ranks.run(end_without_residuals, 4):
        assert norm < 1e-6


# After a step that failed, or is over.


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
