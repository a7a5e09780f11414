"""`Synchronizer.all_reduce_gradients`: the same guarantees without DDP."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.group import run_group
from support.slow import slow
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
    loss_of,
    make_net,
    policy,
    raises,
    skip_not_finite,
    sync_bits,
    weight_bits,
)
from thinwire.sync.buckets import Bucket
from thinwire.testing import RankError, RankPool


def compare_with_ddp(rank: int, world_size: int) -> None:
    """With two ranks a sum has one order, so bits are DDP's, however it is bucketed."""
    models = [DistributedDataParallel(make_net()), make_net()]
    sync = thinwire.Synchronizer("none")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
        sync.all_reduce_gradients(models[1])
        assert_same(grad_bits(models[0]), grad_bits(models[1]), f"gradients of step {step}")
        for optimizer in optimizers:
            optimizer.step()
    assert_same(weight_bits(models[0]), weight_bits(models[1]), "weights")


def test_none_equals_plain_ddp(ranks: RankPool) -> None:
    ranks.run(compare_with_ddp, 2)


def train(
    rank: int, world_size: int, spec: str, algorithm: str, steps: int, group: Any = None
) -> tuple[dict[str, bytes], float, float]:
    model, sync, finish = attached(make_net(), policy(spec), False, algorithm=algorithm, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        finish()
        optimizer.step()
        losses.append(loss.item())
    assert sync.steps == steps
    return weight_bits(model), sum(losses[:20]), sum(losses[-20:])


@pytest.mark.parametrize(("name", "world_size", "steps"), [slow("topk", 3, 100), slow("sharded", 2, 300)])
def test_compressed_replicas_stay_identical(name: str, world_size: int, steps: int) -> None:
    found = run_group(train, world_size, *SPECS[name], steps)
    assert identical(weights for weights, _, _ in found)
    for _, first, last in found:
        assert last < 0.8 * first, "it does not learn"


def conserve(rank: int, world_size: int, group: Any = None) -> None:
    """All specs; other parameters from step to step, in another order, so that runs and owners change."""
    for spec, algorithm in SPECS.values():
        model, sync, _ = attached(Given(), policy(spec), False, algorithm=algorithm, group=group)
        named = dict(model.named_parameters())
        came_in = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in named.items()}
        came_out = {name: tensor.clone() for name, tensor in came_in.items()}
        for step in range(8):
            order = list(named) if step % 4 < 2 else list(named)[::-1]
            chosen = order if step % 3 else order[: 3 + step % 2]
            for (name, parameter), given in zip(named.items(), gradients(model, rank, step), strict=True):
                parameter.grad = given.clone() if name in chosen else None
                came_in[name] += average(given if name in chosen else torch.zeros_like(given), group=group)
            sync.all_reduce_gradients([(name, named[name]) for name in chosen])
            left = average_residuals(sync, group=group)
            for name, parameter in named.items():
                if name in chosen:
                    came_out[name] += parameter.grad.double()
                total = came_out[name] + left.get(name, 0.0)
                torch.testing.assert_close(total, came_in[name], rtol=0, atol=3e-5 * world_size * (step + 1))
        assert sync.residual_norm() > 0


def test_nothing_is_lost_whatever_comes_together() -> None:
    run_group(conserve, 3)


@pytest.mark.parametrize("name", SPECS)
def test_an_inf_on_one_rank_is_skipped_by_all(name: str) -> None:
    run_group(skip_not_finite, 2, *SPECS[name], False)


def missing_gradients(rank: int, world_size: int, spec: str, group: Any = None) -> dict[str, Any]:
    """One parameter has a gradient on rank 0 only, one on none, one wants none; two have no elements or shape."""
    model = nn.ParameterDict(
        {
            "here": nn.Parameter(torch.zeros(5000)),
            "one": nn.Parameter(torch.zeros(50, 100)),
            "none": nn.Parameter(torch.zeros(5000)),
            "frozen": nn.Parameter(torch.zeros(5000), requires_grad=False),
            "empty": nn.Parameter(torch.zeros(0)),
            "scalar": nn.Parameter(torch.zeros(())),
        }
    )
    model["here"].grad = torch.full((5000,), float(rank))
    if rank == 0:
        model["one"].grad = torch.full((100, 50), 2.0).t()
    model["scalar"].grad = torch.tensor(float(rank))
    small = 0 if spec == "none" else 100
    sync = thinwire.Synchronizer(thinwire.Policy(spec, min_numel=small, small_compressor="none"), group=group)
    sync.all_reduce_gradients(model.named_parameters())
    assert model["frozen"].grad is None
    assert model["one"].grad.shape == (50, 100)
    assert model["scalar"].grad.shape == ()
    assert model["empty"].grad.shape == (0,)
    sync.all_reduce_gradients([])  # nothing to do
    return {name: p.grad.unique().tolist() for name, p in model.items() if p.grad is not None}


@pytest.mark.parametrize("spec", ["none", "quantize:bits=8", "topk:ratio=1,bits=32"])
def test_a_missing_gradient_counts_as_zero(spec: str) -> None:
    for found in run_group(missing_gradients, 2, spec):
        assert found["none"] == [0.0]
        assert found["empty"] == []
        assert found["scalar"] == [0.5]
        for name, value in (("here", 0.5), ("one", 1.0)):
            assert found[name] == pytest.approx([value] * len(found[name]), rel=0.01)


def mix_dtypes(rank: int, world_size: int, group: Any = None) -> dict[str, Any]:
    """One bucket for each dtype; residuals are float32, and float64 for float64."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32]
    model = nn.ParameterList([nn.Parameter(torch.zeros(4096 + 64 * i, dtype=dtype)) for i, dtype in enumerate(dtypes)])
    sync = thinwire.Synchronizer(policy(TOPK), group=group)
    came_in, came_out = ([torch.zeros(p.numel(), dtype=torch.float64) for p in model] for _ in range(2))
    for step in range(4):
        for index, parameter in enumerate(model):
            drawn = torch.randn(
                parameter.numel(), generator=torch.Generator().manual_seed(31 * step + 7 * index + rank)
            )
            parameter.grad = drawn.to(parameter.dtype)
            came_in[index] += average(parameter.grad, group=group)
        sync.all_reduce_gradients(model.named_parameters())
        left = average_residuals(sync, group=group)
        for index, parameter in enumerate(model):
            assert parameter.grad.dtype == parameter.dtype
            came_out[index] += parameter.grad.double()
            rough = {torch.bfloat16: 0.03, torch.float16: 4e-3}.get(parameter.dtype, 1e-5)
            torch.testing.assert_close(
                came_out[index] + left[str(index)], came_in[index], rtol=0, atol=rough * (step + 1)
            )
    kinds = {name: residual.dtype for name, residual in sync.residuals.items()}
    assert kinds == {
        str(i): torch.float64 if dtype == torch.float64 else torch.float32 for i, dtype in enumerate(dtypes)
    }
    assert len(sync.state_dict()["layout"]) == 4
    return grad_bits(model)


def test_many_dtypes() -> None:
    assert identical(run_group(mix_dtypes, 3))


def refuse_sparse(rank: int, world_size: int, only: int | None, group: Any = None) -> str:
    table = nn.Embedding(100, 64, sparse=only in (None, rank))
    layer = nn.Linear(64, 64, dtype=torch.float64)  # its bucket comes first
    table(torch.arange(5)).sum().backward()
    layer(torch.ones(64, dtype=torch.float64)).sum().backward()
    sync = thinwire.Synchronizer(policy(TOPK), group=group)
    try:
        sync.all_reduce_gradients(nn.ModuleDict({"table": table, "layer": layer}))
    except (ValueError, thinwire.CollectiveError) as error:
        found = str(error)
    else:
        return "nothing"
    if only is None:  # it goes on without the culprit
        sync.all_reduce_gradients(layer)
        assert sync.steps == 1
    return found


@pytest.mark.parametrize("only", [None, 1], ids=["all ranks", "one rank"])
def test_a_sparse_gradient_is_refused_on_all_ranks(only: int | None) -> None:
    try:
        found = run_group(refuse_sparse, 2, only, timeout=15)
    except RankError as error:
        pytest.fail(f"a rank waits in vain: {str(error)[:300]}")
    assert all("table.weight" in text and "parse" in text for text in found), found


def in_subgroups(rank: int, world_size: int) -> dict[str, Any]:
    """Two groups of two at the same time, each with its own gradients, and a leftover rank."""
    members = [[0, 2], [1, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    if rank == 4:
        with raises(ValueError, "rank 4", "group"):
            thinwire.Synchronizer(policy(TOPK), group=groups[0]).all_reduce_gradients(with_gradients(rank))
        return {}
    sync = thinwire.Synchronizer(policy("quantize:bits=8"), group=groups[rank % 2])
    assert (sync.rank, sync.world_size) == (rank // 2, 2)
    model = with_gradients(rank)
    sync.all_reduce_gradients(model)
    mean = sum(members[rank % 2]) / 2
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, mean), rtol=0.01, atol=0.01)
    return {"group": rank % 2, **grad_bits(model)}


def with_gradients(rank: int) -> nn.Module:
    model = make_net()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(rank))
    return model


def test_groups_of_some_ranks(ranks: RankPool) -> None:
    found = ranks.run(in_subgroups, 5)
    assert found[0] == found[2]
    assert found[1] == found[3]


def begin_again(rank: int, world_size: int, group: Any = None) -> None:
    """A step that is begun and not ended, as by an exception between two buckets, has no effect."""
    ends = []
    for broken in (True, False):
        model, sync, finish = attached(Given(), policy(TOPK), False, algorithm="gather", group=group)
        for step in range(4):
            given = gradients(model, rank, step)
            if broken and step == 2:
                names = ("weights.0", "weights.1", "weights.2")
                sync.add_bucket(Bucket(torch.cat(given[:3]), names, (3000, 10, 700)), first=True, last=False)
            model.zero_grad()
            model(given).backward()
            finish()
        ends.append(grad_bits(model) | sync_bits(sync))
        assert (sync.steps, sync.stats.skipped) == (4, 0)
    assert_same(*ends, "the ends of the runs")


def test_a_step_that_was_not_finished_has_no_effect() -> None:
    run_group(begin_again, 2)


def another_model(rank: int, world_size: int, group: Any = None) -> None:
    sync = thinwire.Synchronizer(policy(TOPK), group=group)
    sync.all_reduce_gradients(with_gradients(rank))
    with raises(ValueError, "0.weight", "2048", "4096"):
        sync.all_reduce_gradients(nn.Sequential(nn.Linear(64, 64)))
    with raises(ValueError, "max_bytes", "raise"):
        thinwire.Synchronizer(policy(TOPK), max_bytes=100, group=group).all_reduce_gradients(with_gradients(rank))
    sync.all_reduce_gradients(with_gradients(rank))
    assert sync.steps == 2


def test_another_model_and_too_small_a_budget_are_refused() -> None:
    run_group(another_model, 2, timeout=30)


def go_on_after_a_failure(rank: int, world_size: int, group: Any = None) -> str:
    """The first bucket fails on all ranks; the odd one leaves, and the others come with their second bucket."""
    sync = thinwire.Synchronizer(policy("quantize:bits=8" if rank == 1 else TOPK), group=group)
    sync.add_bucket(Bucket(torch.ones(5000), ("a",), (5000,)), first=True, last=False)
    assert sync._step is not None
    with raises(thinwire.CollectiveError, "rank"):
        sync._step.handles[0].wait()
    if rank == 1:
        return "left"
    try:
        sync.add_bucket(Bucket(torch.ones(6000), ("b",), (6000,)), first=False, last=True)
        sync.finish()
    except Exception as error:
        return str(error)
    return "nothing"


def test_a_step_that_failed_issues_nothing_more() -> None:
    try:
        found = run_group(go_on_after_a_failure, 3, timeout=12)
    except RankError as error:
        pytest.fail(f"a rank waits for one that has left: {str(error)[:300]}")
    assert found[1] == "left"
    assert all("rank" in text for text in (found[0], found[2])), found
