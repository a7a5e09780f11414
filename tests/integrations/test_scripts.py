"""DDP in ordinary scripts: parameter groups beside it, the optimizer before it, compiled, averaged and tied models."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thinwire
from support.training import SEVERAL, TOPK, identical, loss_of, make_net, no_sync, policy, raises, train, weight_bits
from thinwire import Collective
from thinwire.testing import RankPool


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


def a_compiled_model_is_resumed_without_it(rank: int, world_size: int) -> None:
    """torch.compile before or after DDP, or not at all, on either side of a resume."""
    states, names = [], []
    for how in ("not", "before", "after"):
        module = make_net()
        inner = torch.compile(module, backend="eager") if how == "before" else module
        model = DistributedDataParallel(inner)
        given = torch.compile(model, backend="eager") if how == "after" else model
        optimizer = thinwire.AdamW(given, lr=3e-3, compressor=policy(TOPK), warmup_steps=2)
        assert optimizer.ddp is model
        train(model if how == "not" else given, optimizer, rank, 0, 4)
        names.append([name for name, _ in optimizer.named_parameters()])
        states.append((module.state_dict(), optimizer.state_dict()))
    assert identical(names)
    ends = []
    for weights, state in states:
        module = make_net()
        module.load_state_dict(weights)
        model = DistributedDataParallel(module)
        optimizer = thinwire.AdamW(model, lr=3e-3, compressor=policy(TOPK), warmup_steps=2)
        optimizer.load_state_dict(state)
        train(model, optimizer, rank, 4, 6)
        ends.append(weight_bits(model))
    assert identical(ends)
    sync = thinwire.attach(DistributedDataParallel(torch.compile(make_net(), backend="eager")), policy(TOPK))
    assert sync.numels is not None
    assert list(sync.numels) == names[0]


# What they get wrong: the error names the cause that is the likeliest for what is there.


class WithUnused(nn.Module):
    """A net with a layer that its forward pass leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused = make_net(), nn.Linear(4, 4)

    def forward(self, given: Tensor) -> Tensor:
        return self.net(given)  # type: ignore[no-any-return]


def a_step(rank: int, kind: str) -> None:
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
    words = {
        "unused": ("DDP waits for the gradient of 'unused.weight', 'unused.bias'", "find_unused_parameters=True"),
        "frozen": ("DDP waits for '0.weight', frozen after DistributedDataParallel(...)", "freeze before that"),
        "frozen before": ("neither it nor its forward pass under no_sync()",),
        "no_sync": ("a second exchange before step()", "no_sync() around forward and backward"),
    }[kind]
    with raises(RuntimeError, *words):
        if kind == "no_sync":
            loss_of(ddp, rank, 1).backward()
        optimizer.step()


def every_kind(rank: int, world_size: int) -> str:
    for kind in ("unused", "frozen", "frozen before", "no_sync"):
        a_step(rank, kind)
        dist.barrier()
    ddp, text = DistributedDataParallel(make_net()), ""
    optimizer = thinwire.AdamW(ddp, compressor=policy(TOPK), collective=Collective(timeout=3))
    train(ddp, optimizer, rank, 0, 1)
    if rank == 0:
        try:
            optimizer.consolidate_state_dict()
        except thinwire.CollectiveError as error:
            text = "\n".join([str(error), *error.__notes__])
    dist.barrier()
    return text


def test_the_likeliest_cause_is_named(ranks: RankPool) -> None:
    text = ranks.run(every_kind, 2)[0]
    assert "rank 1 is late" in text
    assert "All ranks call consolidate_state_dict(): it must not stand behind `if rank == 0`." in text


@pytest.mark.parametrize(
    ("scene", "world_size"),
    [
        (groups_of_parameters_beside_ddp, 2),
        (an_optimizer_that_was_made_before_ddp_is_refused, 2),
        (averaged_and_tied_models, 2),
        (a_compiled_model_is_resumed_without_it, 2),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_scenes(ranks: RankPool, scene: Any, world_size: int) -> None:
    """What all ranks return is the same."""
    assert identical(ranks.run(scene, world_size))
