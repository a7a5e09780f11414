"""`thinwire.AdamW` and `thinwire.SGD`: torch's while nothing is compressed, the same replicas when it is."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from support.group import run_group, run_ranks
from support.optimizers import ADAMW, OPTIONS, SGD, make, wrapped
from support.training import (
    TOPK,
    Given,
    assert_same,
    average,
    gradients,
    identical,
    loss_of,
    make_net,
    optimizer_bits,
    plain_module,
    policy,
    raises,
    take,
    train,
    weight_bits,
)
from thinwire import Collective
from thinwire.testing import RankPool


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and the rest, with other rates and decays, as many do."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.2},
        {"params": (p for _, p in named if p.ndim == 1), "weight_decay": 0.0, "lr": 0.005},
    ]


def compare_with_torch(
    rank: int, world_size: int, kind: str, ddp: bool, options: dict[str, Any], exact: bool
) -> dict[str, bytes]:
    """By a schedule that changes momentum, too. A training that goes on from torch's state is the same, also after the
    warm-up."""

    def make_ours(model: nn.Module, warmup_steps: int) -> Any:
        others = {"warmup": "none", "warmup_steps": warmup_steps, **({"ddp": model} if ddp else {})}
        everything = policy("topk:ratio=1,bits=32", small_compressor="none")  # else the last bit decides what is sent
        return getattr(thinwire, kind)(groups_of(model), **options, compressor=everything, **others)

    models = [wrapped(make_net(), True), wrapped(make_net(), ddp)]
    theirs = getattr(torch.optim, kind)(groups_of(models[0]), **options)
    ours = make_ours(models[1], warmup_steps=17)
    assert len(ours.param_groups) == 2
    cycles = ddp and options.get("momentum") != 0.0
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(made, max_lr=[0.01, 0.02], total_steps=20, cycle_momentum=cycles)
        for made in (theirs, ours)
    ]
    for step in range(12):
        for model, optimizer, scheduler in zip(models, (theirs, ours), schedulers, strict=True):
            take(optimizer, loss_of(model, rank, step))
            scheduler.step()
        if exact:
            assert_same(weight_bits(models[0]), weight_bits(models[1]), f"weights after step {step}")
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    right, saved = (optimizer.state_dict()["state"] for optimizer in (theirs, ours))
    back = ours.torch_state_dict()
    assert right.keys() == saved.keys() == back["state"].keys()
    assert all(each.keys() >= theirs.defaults.keys() for each in back["param_groups"])
    for number, kept in right.items():
        for name, tensor in kept.items():
            assert torch.equal(tensor, saved[number][name]) or not exact, f"{name} of parameter {number}"
            torch.testing.assert_close(back["state"][number][name], tensor, rtol=1e-4, atol=1e-7)
    theirs.load_state_dict(back)
    again = wrapped(plain_module(copy.deepcopy(models[1])), ddp)
    loaded = make_ours(again, warmup_steps=5)
    loaded.load_state_dict(theirs.state_dict())
    assert (loaded.param_groups[0]["lr"], loaded.sync.steps) == (theirs.param_groups[0]["lr"], 0)
    for model, optimizer in ((models[1], ours), (again, loaded)):
        train(model, optimizer, rank, 12, 22)
    if not (cycles and kind == "AdamW"):  # whose bias corrections have the betas of all steps in them
        ends = (nn.utils.parameters_to_vector(model.parameters()).detach() for model in (models[1], again, models[0]))
        one, other, before = ends
        assert (one - other).norm() / (one - before).norm() < 3e-4
    return weight_bits(models[1])


@pytest.mark.parametrize(
    ("world_size", "kind", "options", "ddp"),
    [
        (2, "AdamW", ADAMW, True),
        (2, "AdamW", ADAMW, False),
        (3, "AdamW", ADAMW, True),
        (2, "SGD", SGD, False),
        (2, "SGD", {**SGD, "nesterov": True}, True),
        (2, "SGD", {"lr": 0.02, "momentum": 0.0}, False),
    ],
    ids=["AdamW", "AdamW without DDP", "AdamW of three ranks", "SGD", "nesterov", "no momentum"],
)
def test_a_dense_warm_up_is_torchs_optimizer(
    ranks: RankPool, world_size: int, kind: str, options: dict[str, Any], ddp: bool
) -> None:
    exact = world_size == 2  # then the order of a sum is no matter
    assert identical(ranks.run(compare_with_torch, world_size, kind, ddp, options, exact))


def clip(rank: int, world_size: int, ddp: bool, spec: str, dtype: torch.dtype, group: Any = None) -> None:
    """Each rank's own gradient, to the limit times the root of the number of ranks."""
    limit, model = 0.7, wrapped(Given().to(dtype), ddp)
    given_policy = policy(spec, small_compressor="none")
    optimizer = make(
        "SGD", model, given_policy, lr=1.0, momentum=0.0, weight_decay=0.0, max_grad_norm=limit, group=group
    )
    expected = [torch.zeros(weight.numel(), dtype=torch.float64) for weight in plain_module(model).weights]
    for step in range(3):
        given = [part.to(dtype) for part in gradients(plain_module(model), rank, step)]
        if step == 2:  # a short one is left as it is
            given = [1e-4 * part for part in given]
        norm = torch.cat(given).double().norm()
        factor = min(1.0, float(limit * world_size**0.5 / (norm + 1e-6)))
        assert (factor == 1.0) == (step == 2)
        take(optimizer, model(given))
        for total, part in zip(expected, given, strict=True):
            total -= average(factor * part.double(), group=group)
        for weight, total in zip(plain_module(model).weights, expected, strict=True):
            torch.testing.assert_close(weight.detach().double(), total, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("ddp", "spec", "dtype"),
    [
        (True, "topk:ratio=1,bits=32", torch.float32),
        (False, "topk:ratio=1,bits=32", torch.float64),
        (False, "none", torch.float32),
    ],
    ids=str,
)
def test_max_grad_norm(ranks: RankPool, ddp: bool, spec: str, dtype: torch.dtype) -> None:
    run_ranks(ranks if ddp else None, clip, 3, ddp, spec, dtype)


def misuse(rank: int, world_size: int, ddp: bool, group: Any = None) -> None:
    model = wrapped(make_net(), ddp)
    optimizer, before = make("SGD", model, group=group), None
    if ddp:
        with raises(RuntimeError, "no_sync"), model.no_sync():
            loss_of(model, rank, 0).backward()
            optimizer.step()
        with raises(ValueError, "DDP", "exchange"):
            optimizer.exchange()
        with raises(ValueError, "0.weight"):
            thinwire.SGD([p for name, p in model.module.named_parameters() if name != "0.weight"], ddp=model)
        with raises(ValueError, "does not belong"):
            thinwire.SGD(make_net().parameters(), ddp=model)
    take(optimizer, loss_of(model, rank, 0))
    if ddp:
        with raises(RuntimeError, "step()"):
            optimizer.step()
    optimizer.zero_grad()
    with raises(RuntimeError, "second", "step()"):
        for step in range(2):
            loss_of(model, rank, step).backward()
            if not ddp:
                optimizer.exchange()
            before = before or optimizer_bits(optimizer)
    assert_same(before, optimizer_bits(optimizer), "the state")


@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "plain"])
def test_two_exchanges_before_a_step_and_steps_without_one(ranks: RankPool, ddp: bool) -> None:
    run_ranks(ranks if ddp else None, misuse, 2, ddp)


def start_apart(rank: int, world_size: int, how: str, group: Any = None) -> None:
    model = make_net()
    weight = model.get_parameter("2.weight").data
    if how == "random" and rank == world_size - 1:
        weight.normal_()
    elif how == "one element" and rank == 0:
        weight[3, 4] += 1e-3
    elif how == "same sum" and rank == 0:
        weight.copy_(weight.t().clone())
    with raises(ValueError, "'2.weight'", "seed"):
        take(make("SGD", model, group=group), loss_of(model, rank, 0))


def test_replicas_that_start_apart_are_noticed() -> None:
    for how in ("random", "one element", "same sum"):
        run_group(start_apart, 3, how)


def train_in(
    rank: int, world_size: int, kind: str, dtype: torch.dtype, ddp: bool, group: Any = None
) -> tuple[Any, float, float]:
    model = wrapped(make_net(dtype=dtype), ddp)
    optimizer = make(kind, model, warmup_steps=10, group=group)
    losses = train(model, optimizer, rank, 0, 80)
    kept = [tensor for state in optimizer.state_dict()["state"].values() for tensor in state.values()]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert {residual.dtype for residual in optimizer.sync.residuals.values()} == {torch.float32}
    return weight_bits(model), sum(losses[:10]), sum(losses[-10:])


@pytest.mark.parametrize(("kind", "dtype", "ddp"), [("AdamW", torch.bfloat16, True), ("SGD", torch.float16, False)])
def test_short_dtypes(ranks: RankPool, kind: str, dtype: torch.dtype, ddp: bool) -> None:
    found = run_ranks(ranks if ddp else None, train_in, 2, kind, dtype, ddp)
    assert identical(weights for weights, _, _ in found)
    for _, first, last in found:
        assert last < 0.95 * first, "it does not learn"


def change_kind(rank: int, world_size: int, kind: str, options: dict[str, Any], group: Any = None) -> Any:
    model = make_net()
    try:
        optimizer = make(kind, model, thinwire.Policy(min_numel=100, **options), group=group)
    except ValueError as error:
        return str(error)
    train(model, optimizer, rank, 0, 14)
    return weight_bits(model)


CHANGES: dict[str, dict[str, Any]] = {
    "to a dense layer": {
        "overrides": {"4.*": "none"},
        "warmup": [(3, "quantize:bits=8"), *thinwire.ramp("topk:ratio=1/16", 4)],
    },
    "back to dense": {"warmup": [(2, "none"), (3, TOPK), (3, "quantize:bits=8")]},
    "to none": {"compressor": "none", "warmup": [(2, "none"), (5, TOPK)]},
    "to quantize": {"compressor": "quantize:bits=8", "warmup": [(2, "none"), (5, TOPK)]},
}


def test_a_change_of_compressors_keeps_replicas_identical_or_is_refused() -> None:
    """From local momentum there is no step back to torch's that is alike on all ranks."""
    for kind in OPTIONS:
        for name, given in CHANGES.items():
            options = {"compressor": "topk:ratio=1/16", **given}
            assert identical(run_group(change_kind, 2, kind, options)), (kind, name)


WRONG: dict[str, list[dict[str, Any]]] = {
    "lr": [{"lr": -1.0}, {"lr": None}, {"lr": float("nan")}],
    "momentum": [{"momentum": 1.0}],
    "nesterov": [{"nesterov": True, "momentum": 0.0}],
    "weight_decay": [{"weight_decay": -1.0}],
    "beta": [{"betas": (0.9, 1.0)}, {"betas": 0.9}, {"betas": (0.9,)}],
    "eps": [{"eps": -1.0}],
    "warmup_steps": [{"warmup_steps": -1}, {"warmup_steps": 1.5}],
    "nonsense": [{"warmup": "nonsense", "warmup_steps": 1}, {"compressor": "nonsense"}],
    "max_grad_norm": [{"max_grad_norm": 0.0}, {"max_grad_norm": "a"}],
    "ddp": [{"ddp": 5}],
    "tensor": [{"params": torch.ones(3, requires_grad=True)}],
    "no parameter": [{"params": []}],
    "twice": [{"params": [("a", nn.Parameter(torch.ones(3))), ("a", nn.Parameter(torch.ones(4)))]}],
}
"""What is wrong, by a word of its error."""


def test_wrong_arguments() -> None:
    for word, cases in WRONG.items():
        for options in cases:
            kind = thinwire.AdamW if {"betas", "eps"} & options.keys() else thinwire.SGD
            with pytest.raises(ValueError, match=word):
                pytest.fail(f"{options}: {kind(**{'params': make_net(), **options})}")
    model = make_net()
    assert len(thinwire.SGD([{"params": [model[0].weight]}, {"params": [model[0].bias]}]).param_groups) == 2
    assert len(thinwire.SGD([{"params": model.parameters()}]).param_groups) == 1
    with pytest.raises(ValueError, match="group"):
        thinwire.SGD(model).add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def through_zero(rank: int, world_size: int, kind: str, start: float, group: Any = None) -> Any:
    """A schedule whose lr is 0 for some steps, as at its start or the end of a cosine: weights move when it is not."""
    model = make_net()
    optimizer = make(kind, model, warmup_steps=2, lr=start, group=group)
    for step, factor in enumerate((start, start, 1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 1.0, 1.0)):
        optimizer.param_groups[0]["lr"] = factor * OPTIONS[kind]["lr"]
        take(optimizer, loss_of(model, rank, step))
        kept = [tensor for state in optimizer.state_dict()["state"].values() for tensor in state.values()]
        assert all(bool(tensor.isfinite().all()) for tensor in kept), f"moments after step {step}"
    changes = zip(model.parameters(), make_net().parameters(), strict=True)
    assert 1e-6 < max(float((p - q).detach().abs().max()) for p, q in changes) < 1.0
    assert optimizer.skipped == 0
    return weight_bits(model)


def test_a_schedule_that_goes_through_zero_or_begins_there() -> None:
    for kind in OPTIONS:
        for start in (1.0, 0.0):
            assert identical(run_group(through_zero, 2, kind, start)), (kind, start)


def warm_up_sharded(rank: int, world_size: int, group: Any = None) -> float:
    """The error of a warm-up in 8 bits, when sums after it are compressed by a sparse compressor."""
    model = Given((5000, 8192))
    options: dict[str, Any] = {
        "warmup_steps": 3,
        "collective": Collective(algorithm="sharded", shard_compressor=TOPK),
        "group": group,
    }
    optimizer = thinwire.SGD(model, lr=1.0, compressor=TOPK, **options)
    expected = [torch.zeros(weight.numel(), dtype=torch.float64) for weight in model.weights]
    for step in range(3):
        given = gradients(model, rank, step)
        take(optimizer, model(given))
        for total, part in zip(expected, given, strict=True):
            total -= average(part, group)
    pairs = zip(model.weights, expected, strict=True)
    return max(float((weight.detach() - total).norm() / total.norm()) for weight, total in pairs)


def test_a_sparse_compressor_of_sums_takes_nothing_from_the_warm_up() -> None:
    assert all(error < 0.03 for error in run_group(warm_up_sharded, 2))
