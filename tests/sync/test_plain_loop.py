"""`Synchronizer.all_reduce_gradients`: the same guarantees without DDP."""

from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from support.by_threads import by_threads
from support.group import run_group
from support.training import (
    SPECS,
    TOPK,
    Given,
    assert_same,
    attached,
    average,
    average_residuals,
    grad_bits,
    gradients,
    identical,
    make_net,
    policy,
    raises,
    skip_not_finite,
    sync_bits,
)
from thinwire import Collective
from thinwire.collectives import LocalGroup
from thinwire.sync.buckets import Bucket


@by_threads(3)
def test_nothing_is_lost_whatever_comes_together(group: LocalGroup) -> None:
    """All specs; other parameters from step to step, in another order, so that runs and owners change."""
    for spec, algorithm in SPECS.values():
        model, sync, _ = attached(Given(), policy(spec), False, collective=Collective(algorithm=algorithm), group=group)
        named = dict(model.named_parameters())
        came_in = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in named.items()}
        came_out = {name: tensor.clone() for name, tensor in came_in.items()}
        for step in range(8):
            order = list(named) if step % 4 < 2 else list(named)[::-1]
            chosen = order if step % 3 else order[: 3 + step % 2]
            for (name, parameter), given in zip(named.items(), gradients(model, group.rank, step), strict=True):
                parameter.grad = given.clone() if name in chosen else None
                came_in[name] += average(given if name in chosen else torch.zeros_like(given), group=group)
            sync.all_reduce_gradients([(name, named[name]) for name in chosen])
            left = average_residuals(sync, group=group)
            for name, parameter in named.items():
                if name in chosen:
                    came_out[name] += parameter.grad.double()
                total = came_out[name] + left.get(name, 0.0)
                torch.testing.assert_close(total, came_in[name], rtol=0, atol=3e-5 * group.size * (step + 1))
        assert sync.residual_norm() > 0


@pytest.mark.parametrize("name", ["topk", "sharded", "quantize"])
def test_an_inf_on_one_rank_is_skipped_by_all(name: str) -> None:
    run_group(skip_not_finite, 2, *SPECS[name], False)


@by_threads(2)
def test_a_missing_gradient_counts_as_zero(group: LocalGroup) -> None:
    """One parameter has a gradient on rank 0 only, one on none, one wants none; two have no elements or shape."""
    shapes = {"here": (5000,), "one": (50, 100), "none": (5000,), "frozen": (5000,), "empty": (0,), "scalar": ()}
    for spec in ("none", "topk:ratio=1,bits=32"):
        model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})
        model["frozen"].requires_grad_(False)
        model["here"].grad = torch.full((5000,), float(group.rank))
        if group.rank == 0:
            model["one"].grad = torch.full((100, 50), 2.0).t()
        model["scalar"].grad = torch.tensor(float(group.rank))
        small = 0 if spec == "none" else 100
        sync = thinwire.Synchronizer(thinwire.Policy(spec, min_numel=small, small_compressor="none"), group=group)
        sync.all_reduce_gradients(model.named_parameters())
        sync.all_reduce_gradients([])  # nothing to do
        assert model["frozen"].grad is None
        for name, value in (("here", 0.5), ("one", 1.0), ("none", 0.0), ("empty", 0.0), ("scalar", 0.5)):
            found = model[name].grad
            assert found.shape == shapes[name], (spec, name)
            torch.testing.assert_close(
                found, torch.full(shapes[name], value), rtol=0.01, atol=0.0, msg=f"{spec}, {name}"
            )


def mix_dtypes(rank: int, world_size: int, group: Any = None) -> dict[str, Any]:
    """One bucket for each dtype; residuals are float32, and float64 for float64."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32]
    model = nn.ParameterList([nn.Parameter(torch.zeros(4096 + 64 * i, dtype=dtype)) for i, dtype in enumerate(dtypes)])
    sync = thinwire.Synchronizer(policy(TOPK), group=group)
    for parameter in model:
        drawn = torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(parameter.numel() + rank))
        parameter.grad = drawn.to(parameter.dtype)
    came_in = [average(parameter.grad, group=group) for parameter in model]
    sync.all_reduce_gradients(model.named_parameters())
    left = average_residuals(sync, group=group)
    for index, parameter in enumerate(model):
        assert parameter.grad.dtype == parameter.dtype
        rough = {torch.bfloat16: 0.03, torch.float16: 4e-3}.get(parameter.dtype, 1e-5)
        torch.testing.assert_close(parameter.grad.double() + left[str(index)], came_in[index], rtol=0, atol=rough)
    kinds = {sync.residuals[str(i)].dtype for i, dtype in enumerate(dtypes) if dtype != torch.float64}
    assert (kinds, sync.residuals["3"].dtype) == ({torch.float32}, torch.float64)
    assert len(sync.state_dict()["layout"]) == 4
    return grad_bits(model)


def test_many_dtypes() -> None:
    assert identical(run_group(mix_dtypes, 3))


def refuse_sparse(rank: int, world_size: int, only: int | None, group: Any = None) -> None:
    table = nn.Embedding(100, 64, sparse=only in (None, rank))
    layer = nn.Linear(64, 64, dtype=torch.float64)  # its bucket comes first
    table(torch.arange(5)).sum().backward()
    layer(torch.ones(64, dtype=torch.float64)).sum().backward()
    sync = thinwire.Synchronizer(policy(TOPK), group=group)
    with raises((ValueError, thinwire.CollectiveError), "table.weight", "parse"):
        sync.all_reduce_gradients(nn.ModuleDict({"table": table, "layer": layer}))
    if only is None:  # it goes on without the culprit
        sync.all_reduce_gradients(layer)
        assert sync.steps == 1


def test_a_sparse_gradient_of_all_ranks_or_one_is_refused_on_all() -> None:
    for only in (None, 1):
        run_group(refuse_sparse, 2, only, timeout=15)


@by_threads(2)
def test_a_step_that_was_not_finished_has_no_effect(group: LocalGroup) -> None:
    """As after an exception between two buckets."""
    ends = []
    for broken in (True, False):
        model, sync, finish = attached(
            Given(), policy(TOPK), False, collective=Collective(algorithm="gather"), group=group
        )
        for step in range(4):
            given = gradients(model, group.rank, step)
            if broken and step == 2:
                names = ("weights.0", "weights.1", "weights.2")
                sync.add_bucket(Bucket(torch.cat(given[:3]), names, (3000, 10, 700)), first=True, last=False)
            model.zero_grad()
            model(given).backward()
            finish()
        ends.append(grad_bits(model) | sync_bits(sync))
        assert (sync.steps, sync.stats.skipped) == (4, 0)
    assert_same(*ends, "the ends of the runs")


@by_threads(2, timeout=30)
def test_another_model_is_refused(group: LocalGroup) -> None:
    model = make_net()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(group.rank))
    sync = thinwire.Synchronizer(policy(TOPK), group=group)
    sync.all_reduce_gradients(model)
    with raises(ValueError, "0.weight", "2048", "4096"):
        sync.all_reduce_gradients(nn.Sequential(nn.Linear(64, 64)))
    sync.all_reduce_gradients(model)
    assert sync.steps == 2
