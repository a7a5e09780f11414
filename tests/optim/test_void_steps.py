"""A NaN on one rank, in whichever bucket, or a finite gradient that is far too large: the step is void on every rank,
and the next one is as if it had not been. And steps that are skipped again and again."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.optimizers import make, wrapped
from support.oracle import same_bits
from support.training import (
    SEVERAL,
    TOPK,
    VIEWS,
    Given,
    assert_same,
    gradients,
    identical,
    loss_of,
    make_net,
    optimizer_bits,
    policy,
    take,
    weight_bits,
)
from thinwire import Collective
from thinwire.sync.synchronizer import SKIPPED_IN_A_ROW
from thinwire.testing import RankPool

SIZES = (2048, 2048, 10, 3000, 700, 2048)
"""Four of them fill a bucket each."""


def places(layout: list[list[str]]) -> list[int]:
    """The numbers of weights of the first bucket, of one in the middle, of the last; and of the small one."""
    assert len(layout) >= 3, layout
    names = [layout[0][0], layout[len(layout) // 2][-1], layout[-1][-1], "weights.2"]
    return [int(name.removeprefix("weights.")) for name in names]


def spoil(rank: int, world_size: int, kind: str, algorithm: str, options: dict[str, Any]) -> dict[str, bytes]:
    """In the warm-up and after it; the run beside it never meets a NaN."""
    models = [DistributedDataParallel(Given(SIZES), **options) for _ in range(2)]
    collective = Collective(algorithm=algorithm)
    optimizers = [make(kind, model, warmup_steps=4, collective=collective) for model in models]
    optimizer, void = optimizers[0], 0
    for step in range(8):
        for place in places(optimizer.sync.state_dict()["layout"]) if step in (3, 6) else ():
            before, given = optimizer_bits(optimizer), gradients(models[0].module, rank, 500 + step)
            if rank == world_size - 1:
                given[place][3] = torch.nan
            take(optimizer, models[0](given))
            void += 1
            assert optimizer.sync.finite is False
            assert (optimizer.skipped, optimizer.sync.steps) == (void, step)
            assert_same(before, optimizer_bits(optimizer), f"step {step}, weight {place}")
            for weight, part in zip(models[0].module.weights, given, strict=True):
                assert same_bits(weight.grad, part), "grad stays the gradient of this rank"
        for model, each in zip(models, optimizers, strict=True):
            take(each, model(gradients(model.module, rank, step)))
        assert optimizer.sync.finite is True
        assert_same(*map(optimizer_bits, optimizers), f"the runs with and without a NaN, after step {step}")
    assert void == 8
    assert optimizer.sync.residual_norm() > 0
    return weight_bits(models[0])


@pytest.mark.parametrize(
    ("kind", "algorithm", "options"),
    [("AdamW", "gather", SEVERAL), ("AdamW", "sharded", VIEWS), ("SGD", "sharded", SEVERAL)],
    ids=["AdamW", "views", "SGD"],
)
def test_a_nan_in_any_bucket_voids_the_step(
    ranks: RankPool, kind: str, algorithm: str, options: dict[str, Any]
) -> None:
    """With `attach`: see test_ddp.py."""
    assert identical(ranks.run(spoil, 3, kind, algorithm, options))


STEPS, WARMUP = 40, 10


def spike(
    rank: int, world_size: int, ddp: bool, at: int, small: int, max_grad_norm: float | None, skipped: int
) -> dict[str, bytes]:
    """Multiply the loss of the last rank by 1e30 once."""
    model = wrapped(make_net(), ddp)
    options: dict[str, Any] = {"warmup_steps": WARMUP, "refresh_every": 16, "max_grad_norm": max_grad_norm}
    optimizer = thinwire.AdamW(model, lr=3e-3, compressor=policy(TOPK, min_numel=small), **options)
    losses, moved = [], 0.0
    for step in range(STEPS):
        before, loss = nn.utils.parameters_to_vector(model.parameters()).detach(), loss_of(model, rank, step)
        take(optimizer, loss * 1e30 if step == at and rank == world_size - 1 else loss)
        losses.append(loss.item())
        if step == at:
            moved = float((nn.utils.parameters_to_vector(model.parameters()).detach() - before).abs().max())
    moments = [kept["exp_avg_sq"] for kept in optimizer.state_dict()["state"].values()]
    assert all(bool(v.isfinite().all()) for v in moments)
    assert (optimizer.sync.steps, optimizer.skipped) == (STEPS - skipped, skipped)
    assert (moved == 0) == (skipped == 1)
    assert moved < 1.0
    assert sum(losses[-5:]) / 5 < 0.8 * sum(losses[:5]) / 5, "it does not learn any more"
    return weight_bits(model)


@pytest.mark.parametrize(
    ("ddp", "at", "small", "max_grad_norm", "skipped"),
    [
        (True, WARMUP // 2, 100, None, 1),
        (False, WARMUP - 1, 100, None, 1),
        (True, WARMUP + 5, 0, None, 1),
        (False, WARMUP // 2, 100, 1.0, 0),
        (True, WARMUP + 5, 100, 1.0, 0),
    ],
    ids=["in the warm-up", "the last of the warm-up", "later", "in the warm-up, clipped", "later, clipped"],
)
def test_a_spike_is_skipped_or_clipped_and_training_goes_on(
    ranks: RankPool, ddp: bool, at: int, small: int, max_grad_norm: float | None, skipped: int
) -> None:
    """Whether a tensor's gradient or its update is sent, its square would be infinite."""
    assert identical(ranks.run(spike, 2, ddp, at, small, max_grad_norm, skipped))


def skip(rank: int, world_size: int, kind: str, value: float) -> list[int]:
    """Steps at which a warning came, of which the last rank's gradient was large in all."""
    model = Given((5000, 10))
    optimizer = getattr(thinwire, kind)(model, compressor=TOPK, warmup_steps=100)
    warned = []
    for step in range(1, 3 * SKIPPED_IN_A_ROW):
        value_here = value if rank and step != 10 else 1.0 + rank
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            take(optimizer, model([torch.full((size,), value_here) for size in (5000, 10)]))
        warned += [step for one in caught if "steps in a row were skipped" in str(one.message)]
        assert not [str(one.message) for one in caught if "in a row" not in str(one.message)]
    assert (optimizer.sync.steps, optimizer.skipped) == (1, 3 * SKIPPED_IN_A_ROW - 2)
    assert sum(float(weight.detach().abs().sum()) for weight in model.weights) > 0
    return warned


@pytest.mark.parametrize(("kind", "value"), [("AdamW", 1e25), ("SGD", float("nan"))])
def test_more_than_twenty_skipped_steps_in_a_row_are_warned_of_once(ranks: RankPool, kind: str, value: float) -> None:
    """Step 10 is taken, so that the row begins behind it."""
    assert ranks.run(skip, 2, kind, value) == [[10 + SKIPPED_IN_A_ROW + 1]] * 2
