"""DDP in ordinary scripts: parameter groups, an optimizer before it, compiled and averaged models, loops, errors."""

import copy
import gc
import time
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thinwire
from support.training import (
    SEVERAL,
    TOPK,
    identical,
    loss_of,
    make_net,
    no_sync,
    policy,
    raises,
    seeded,
    train,
    weight_bits,
)
from thinwire import Collective
from thinwire.collectives.transport.link import GlooLink, LinkBroken
from thinwire.testing import RankPool, store_barrier


class Derived(DistributedDataParallel):
    """As frameworks have it."""


def groups_of_parameters_beside_ddp(rank: int, world_size: int) -> dict[str, bytes]:
    """Groups of parameters, as for weight decay: DDP is found, and sends nothing by itself."""
    others = [DistributedDataParallel(make_net(seed)) for seed in (1, 2)]  # they must not be taken
    ends = []
    for found in (True, False):
        module = make_net()
        model = (Derived if found else DistributedDataParallel)(module, **SEVERAL)
        decay = [p for p in module.parameters() if p.dim() > 1]
        rest = [p for p in module.parameters() if p.dim() <= 1]
        groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
        given: dict[str, Any] = {} if found else {"ddp": model}
        optimizer = thinwire.AdamW(groups, lr=3e-3, compressor=policy(TOPK), warmup_steps=2, **given)
        assert optimizer.ddp is model
        assert [group["param_names"][0] for group in optimizer.param_groups] == ["0.weight", "0.bias"]
        train(model, optimizer, rank, 0, 4)
        with no_sync(model):  # accumulation, and an evaluation between the two passes
            loss_of(model, rank, 9).backward()
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, 32))
        model.train()
        loss_of(model, rank, 10).backward()
        optimizer.step()
        ends.append(weight_bits(model))
    assert identical(ends)
    for given in (module.parameters(), module, [p for name, p in module.named_parameters() if name != "0.bias"]):
        with raises((ValueError, RuntimeError)):  # it has a hook by now; and one is left out
            thinwire.SGD(given, lr=0.1)
    with raises(ValueError, "2 DDP models", "an optimizer for each"):
        thinwire.SGD([p for other in others for p in other.parameters()], lr=0.1)
    return ends[0]


def an_optimizer_that_was_made_before_ddp_is_refused(rank: int, world_size: int) -> None:
    module = make_net()
    optimizer = thinwire.SGD(module.parameters(), lr=0.1, compressor=policy(TOPK))
    model = DistributedDataParallel(module)
    before = weight_bits(module)
    loss_of(model, rank, 0).backward()
    with raises(
        RuntimeError, "after this optimizer was made", "make thinwire.SGD after DistributedDataParallel(model)"
    ):
        optimizer.step()
    assert weight_bits(module) == before
    del model
    train(module, optimizer, rank, 0, 2)  # without DDP; it begins with an evaluation in many scripts
    assert optimizer.sync.steps == 2
    before, model = weight_bits(module), Derived(module)
    for step in (2, 3):
        with raises(RuntimeError, "make thinwire.SGD after DistributedDataParallel(model)"):
            train(model, optimizer, rank, step, step + 1)
    assert weight_bits(module) == before
    ignored = make_net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignored, ["0.weight", "0.bias"])
    model = DistributedDataParallel(ignored)
    optimizer = thinwire.SGD(ignored[0].parameters(), lr=0.1, compressor=policy(TOPK))
    assert optimizer.ddp is None, "what DDP ignores is for another optimizer"
    loss_of(model, rank, 0).backward()
    optimizer.step()


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_net()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        nn.init.eye_(self.first.weight)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(self.body(given)))
        return result


def averaged_and_tied_models(rank: int, world_size: int) -> dict[str, bytes]:
    """Averages of weights, of the DDP model and of the model inside; of a model with a weight that has two names."""
    module = Tied()
    model = DistributedDataParallel(module)
    optimizer = thinwire.AdamW(model, lr=3e-3, compressor=policy(TOPK), warmup_steps=2)
    means = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in (model, module)]
    plain = [p.detach().clone() for p in module.parameters()]
    for step in range(5):
        train(model, optimizer, rank, step, step + 1)
        for mean in means:
            mean.update_parameters(model if mean is means[0] else module)
        plain = [
            p.detach().clone() if step == 0 else old.lerp(p.detach(), 0.5)
            for old, p in zip(plain, module.parameters(), strict=True)
        ]
    for mean in means:
        for one, other in zip(mean.module.parameters(), plain, strict=True):
            torch.testing.assert_close(one, other)
    assert module.first.weight is module.last.weight
    assert sum(name.endswith("first.weight") for name, _ in optimizer.named_parameters()) == 1
    with raises(TypeError, "state_dict()"):
        copy.deepcopy(optimizer)
    return weight_bits(model)


def names_are_those_of_the_model_that_is_compiled(rank: int, world_size: int) -> None:
    """torch.compile before or after DDP, or not at all: so that a resume may be with another of them."""
    names = []
    for how in ("not", "before", "after"):
        module = make_net()
        model = DistributedDataParallel(torch.compile(module, backend="eager") if how == "before" else module)
        given = torch.compile(model, backend="eager") if how == "after" else model
        optimizer = thinwire.AdamW(given, lr=3e-3, compressor=policy(TOPK), warmup_steps=2)
        assert optimizer.ddp is model
        train(given, optimizer, rank, 0, 4)
        names.append([name for name, _ in optimizer.named_parameters()])
    sync = thinwire.attach(DistributedDataParallel(torch.compile(make_net(), backend="eager")), policy(TOPK))
    names.append(list(sync.numels or {}))
    assert names == [[name for name, _ in make_net().named_parameters()]] * 4


# What they get wrong: the error names the cause that is the likeliest for what is there.


class WithUnused(nn.Module):
    """A net with a layer that its forward pass leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused = make_net(), nn.Linear(4, 4)

    def forward(self, given: Tensor) -> Tensor:
        return self.net(given)  # type: ignore[no-any-return]


CAUSES = {
    "unused": ("DDP waits for the gradient of 'unused.weight', 'unused.bias'", "find_unused_parameters=True"),
    "frozen": ("DDP waits for '0.weight', frozen after DistributedDataParallel(...)", "freeze before that"),
    "frozen before": ("neither it nor its forward pass under no_sync()",),
    "no_sync": ("a second exchange before step()", "no_sync() around forward and backward"),
}


def every_kind(rank: int, world_size: int) -> str:
    for kind, words in CAUSES.items():
        net = WithUnused() if kind == "unused" else make_net()
        if kind == "frozen before":
            next(net.parameters()).requires_grad_(False)
        ddp = DistributedDataParallel(net)
        optimizer = thinwire.AdamW(ddp, compressor=policy(TOPK))
        if kind == "frozen":
            train(ddp, optimizer, rank, 0, 1)
            optimizer.zero_grad()
            next(ddp.module.parameters()).requires_grad_(False)
        with ddp.no_sync() if kind == "frozen before" else nullcontext():
            loss = loss_of(ddp, rank, 1)
            with ddp.no_sync() if kind == "no_sync" else nullcontext():
                loss.backward()
        with raises(RuntimeError, *words):
            if kind == "no_sync":
                loss_of(ddp, rank, 1).backward()
            optimizer.step()
        dist.barrier()
    ddp, text = DistributedDataParallel(make_net()), ""
    optimizer = thinwire.AdamW(ddp, compressor=policy(TOPK), collective=Collective(timeout=3))
    train(ddp, optimizer, rank, 0, 1)
    if rank == 0:
        with pytest.raises(thinwire.CollectiveError) as caught:
            optimizer.consolidate_state_dict()
        text = "\n".join([str(caught.value), *caught.value.__notes__])
    dist.barrier()
    return text


def test_the_likeliest_cause_is_named(ranks: RankPool) -> None:
    text = ranks.run(every_kind, 2)[0]
    assert "rank 1 is late" in text
    assert "All ranks call consolidate_state_dict(): it must not stand behind `if rank == 0`." in text


SCENES = (
    groups_of_parameters_beside_ddp, an_optimizer_that_was_made_before_ddp_is_refused, averaged_and_tied_models,
    names_are_those_of_the_model_that_is_compiled,
)  # fmt: skip


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_scenes(ranks: RankPool, scene: Any) -> None:
    """What all ranks return is the same."""
    assert identical(ranks.run(scene, 2))


# Models and loops as people have them.


def convolve(rank: int, world_size: int, ddp: bool, kind: str) -> float:
    """How far apart training ends in the two memory formats, when everything is sent."""
    ends = []
    # c of AdamW is measured on a sample in the order of the memory, which is what differs here.
    more = {"refresh_every": 0} if kind == "AdamW" else {}
    for memory_format in (torch.contiguous_format, torch.channels_last):
        with seeded(0):
            net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 24, 3), nn.Flatten(), nn.Linear(384, 4))
        net = net.to(memory_format=memory_format)
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
    assert max(ranks.run(convolve, 2, ddp, kind)) < 1e-4


def odd_loops(rank: int, world_size: int) -> None:
    """step() left out; gradients averaged before, as by a wrapper that is no DDP; join(); checkpoints of two steps."""
    ddp = DistributedDataParallel(make_net())
    optimizer = thinwire.SGD(ddp, lr=0.1, compressor=policy(TOPK))
    train(ddp, optimizer, rank, 0, 1)
    loss_of(ddp, rank, 1).backward()
    train(ddp, optimizer, rank, 2, 4)
    assert optimizer.state_dict()["thinwire"]["count"] == 3
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
    assert max(ranks.run(end_without_residuals, 4)) < 1e-6


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
