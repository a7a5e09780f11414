"""A gradient that is finite, but far too large, on one rank at one step; and steps that are skipped again and again."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from support.optimizers import wrapped
from support.training import TOPK, Given, identical, loss_of, make_net, policy, take, weight_bits
from thinwire.sync.synchronizer import SKIPPED_IN_A_ROW
from thinwire.testing import RankPool

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
        optimizer.zero_grad()
        model([torch.full((size,), value if rank and step != 10 else 1.0 + rank) for size in (5000, 10)]).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        warned += [step for one in caught if "steps in a row were skipped" in str(one.message)]
        assert not [str(one.message) for one in caught if "in a row" not in str(one.message)]
    assert (optimizer.sync.steps, optimizer.skipped) == (1, 3 * SKIPPED_IN_A_ROW - 2)
    assert sum(float(weight.detach().abs().sum()) for weight in model.weights) > 0
    return warned


@pytest.mark.parametrize(("kind", "value"), [("AdamW", 1e25), ("SGD", float("nan"))])
def test_more_than_twenty_skipped_steps_in_a_row_are_warned_of_once(ranks: RankPool, kind: str, value: float) -> None:
    """Step 10 is taken, so that the row begins behind it."""
    assert ranks.run(skip, 2, kind, value) == [[10 + SKIPPED_IN_A_ROW + 1]] * 2
