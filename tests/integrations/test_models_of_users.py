"""Models and loops as people have them: other memory formats, layers that are frozen, unused or late, odd loops."""

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
from support.training import TOPK, loss_of, make_net, policy, raises, weight_bits
from thinwire.testing import RankPool


def make_convolution(memory_format: torch.memory_format) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
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


def be_freed(rank: int, world_size: int) -> list[bool]:
    model = DistributedDataParallel(make_net())
    optimizer = thinwire.AdamW(model, compressor=policy(TOPK), warmup_steps=1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    left = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer.sync)]
    del model, optimizer
    end = time.monotonic() + 20
    while any(reference() is not None for reference in left) and time.monotonic() < end:
        gc.collect()  # a thread of the last exchange may be about to let go
        time.sleep(0.01)
    return [reference() is None for reference in left]


def test_a_model_and_its_optimizer_can_be_freed(ranks: RankPool) -> None:
    assert ranks.run(be_freed, 2) == [[True] * 3] * 2


def unfreeze(rank: int, world_size: int) -> tuple[bool, bytes]:
    model = make_net()
    model[0].requires_grad_(False)
    optimizer = thinwire.SGD(model, lr=0.1, compressor=policy(TOPK))
    start = model[0].weight.detach().clone()
    for step in range(6):
        if step == 3:
            assert torch.equal(model[0].weight, start)
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return torch.equal(model[0].weight.detach(), start), b"".join(weight_bits(model).values())


def test_a_layer_may_be_unfrozen_later(ranks: RankPool) -> None:
    (stood, mine), (also_stood, theirs) = ranks.run(unfreeze, 2)
    assert not stood
    assert not also_stood
    assert mine == theirs


def come_late(rank: int, world_size: int) -> float:
    """A second head gets its first gradient long after the warm-up."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body, heads = nn.Linear(32, 64), nn.ModuleList([nn.Linear(64, 8), nn.Linear(64, 8)])
    model = nn.ModuleList([body, heads])
    optimizer = thinwire.AdamW(model, lr=1e-2, compressor=policy("topk:ratio=1/4"), warmup_steps=5)
    for step in range(120):
        given = torch.randn(16, 32, generator=torch.Generator().manual_seed(2 * step + rank))
        late = step >= 20
        hidden = torch.tanh(body(given))
        loss = (heads[0](hidden) - given[:, :8]).square().mean()
        loss = loss + (heads[1](hidden) - given[:, 8:16]).square().mean() if late else loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float((heads[1](hidden) - given[:, 8:16]).detach().square().mean())


def test_a_layer_whose_first_gradient_is_late_learns(ranks: RankPool) -> None:
    for loss in ranks.run(come_late, 2):
        assert loss < 0.6  # 1.0 is that of not learning at all


def drop_a_step(rank: int, world_size: int) -> int:
    """A loop that leaves out step() when it does not like the loss."""
    model = DistributedDataParallel(make_net())
    optimizer = thinwire.SGD(model, lr=0.1, compressor=policy(TOPK))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step != 1:
            optimizer.step()
    return optimizer._count


def test_a_step_may_be_left_out(ranks: RankPool) -> None:
    assert ranks.run(drop_a_step, 2) == [3, 3]


def be_averaged_twice(rank: int, world_size: int) -> None:
    model = make_net()
    optimizer = thinwire.SGD(model.parameters(), lr=0.1, compressor=policy(TOPK))
    loss_of(model, rank, 0).backward()
    for parameter in model.parameters():  # as a wrapper that is no DDP
        dist.all_reduce(parameter.grad)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("give the DDP model itself" in str(one.message) for one in caught), caught
    with raises(ValueError, "DDP model inside"):
        thinwire.SGD(nn.Sequential(DistributedDataParallel(make_net())), lr=0.1)


def test_gradients_that_are_averaged_before_are_noticed(ranks: RankPool) -> None:
    ranks.run(be_averaged_twice, 2)


def join(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(make_net())
    optimizer = thinwire.SGD(model, lr=0.1, compressor=policy(TOPK))
    with raises(RuntimeError, "join"), model.join():
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()


def test_join_is_refused(ranks: RankPool) -> None:
    ranks.run(join, 2)


def fit_nothing(rank: int, world_size: int) -> None:
    for wrong in ({"exclude": ["embedding.*"]}, {"overrides": {"head": "none"}}):
        with raises(ValueError, "fits no parameter"):
            thinwire.attach(DistributedDataParallel(make_net()), policy(TOPK, **wrong))
        with raises(ValueError, "fits no parameter"):
            thinwire.SGD(make_net(), compressor=policy(TOPK, **wrong))


def test_patterns_that_fit_nothing_are_an_error(ranks: RankPool) -> None:
    ranks.run(fit_nothing, 2)


def mix_steps(rank: int, world_size: int) -> None:
    """Checkpoints of which one rank's is older, as when a job is killed while it saves."""
    states = []
    model = make_net()
    optimizer = thinwire.SGD(model, lr=0.1, compressor=policy(TOPK))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        states.append(optimizer.state_dict())
    other = thinwire.SGD(make_net(), lr=0.1, compressor=policy(TOPK))
    other.load_state_dict(states[2 - rank])
    loss_of(model, rank, 3).backward()
    for mine, theirs in zip(other.named_parameters(), model.named_parameters(), strict=True):
        mine[1].grad = theirs[1].grad
    with raises(ValueError, "different steps", "rank 0 at 3", "rank 1 at 2"):
        other.step()


def test_checkpoints_of_different_steps_are_noticed(ranks: RankPool) -> None:
    ranks.run(mix_steps, 2)


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
