""" "auto" after it has chosen dense: nothing is lost on the way back, and steps are those of torch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from support.training import Given, force, gradients, take
from thinwire import Collective
from thinwire.collectives import LocalGroup
from thinwire.sync.auto import BEFORE, GRADIENTS, STEPS, TURNS, Choice, updates
from thinwire.testing import run_threads

SIZES = (6000, 8192)
OVER = BEFORE + TURNS * STEPS * len(GRADIENTS)
OVER_UPDATES = BEFORE + TURNS * STEPS * len(updates(2))
OF_SUMS = "topk:ratio=1/512"
"""The compressor of sums leaves much to owners."""


def averages(model: Given, step: int, ranks: int) -> list[Tensor]:
    """The average gradients, from those of all ranks."""
    parts = zip(*(gradients(model, rank, step) for rank in range(ranks)), strict=True)
    return [torch.stack(part).double().mean(dim=0) for part in parts]


def train(sync: thinwire.Synchronizer, model: Given, group: LocalGroup, steps: int) -> list[int]:
    """Exchange gradients without an optimizer. Return the bytes of each step."""
    sent = []
    for step in range(steps):
        model.zero_grad()
        model(gradients(model, group.rank, step)).backward()
        sync.all_reduce_gradients(model)
        sent.append(sync.stats.last_bytes_sent)
    return sent


def go_back(group: LocalGroup, sends_updates: bool) -> None:
    """Weights of SGD are minus the sum of all averages once dense is chosen, however they were sent before."""
    model, options = (
        Given(SIZES),
        {"group": group, "collective": Collective(algorithm="sharded", shard_compressor=OF_SUMS)},
    )
    if sends_updates:
        optimizer: Any = thinwire.SGD(model, lr=0.5, compressor="auto", warmup_steps=2, warmup="none", **options)
        sync, steps = optimizer.sync, OVER_UPDATES + 2
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        sync, steps = thinwire.Synchronizer("auto", **options), OVER + 2
    force(sync, 0)
    came_in = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    for step in range(steps):
        optimizer.zero_grad()
        model(gradients(model, group.rank, step)).backward()
        if not sends_updates:
            sync.all_reduce_gradients(model)
        optimizer.step()
        for total, average in zip(came_in, averages(model, step, group.size), strict=True):
            total += average
    assert sync.choice is not None
    assert not sync.residuals
    # An optimizer tries 8 bits without a residual: in 8 steps an element errs by 0.02 or so.
    close = 0.15 if sends_updates else 1e-3
    for weight, total in zip(model.weights, came_in, strict=True):
        torch.testing.assert_close(weight.detach().double(), -0.5 * total, rtol=1e-5, atol=close)


def test_auto_sends_what_owners_have_when_it_goes_back_to_dense() -> None:
    run_threads(go_back, 2, False)


def test_auto_applies_what_owners_have_when_it_goes_back_to_dense() -> None:
    run_threads(go_back, 2, True)


def follow_torch(group: LocalGroup) -> None:
    """From the choice on, the moments and weights are those that torch's AdamW makes of them."""
    ours, theirs = Given(SIZES), Given(SIZES)
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    mine = thinwire.AdamW(ours, compressor="auto", group=group, **options)
    force(mine.sync, 0)
    reference = torch.optim.AdamW(theirs.parameters(), **options)
    for step in range(OVER_UPDATES + 6):
        if step == OVER_UPDATES + 1:
            assert mine.sync.choice is not None
            theirs.load_state_dict(ours.state_dict())
            kept = copy.deepcopy(mine.state_dict()["state"])  # torch would use the same memory
            reference.load_state_dict({**reference.state_dict(), "state": kept})
        take(mine, ours(gradients(ours, group.rank, step)))
        if step > OVER_UPDATES:
            for weight, average in zip(theirs.weights, averages(theirs, step, group.size), strict=True):
                weight.grad = average.float()
            reference.step()
            for one, other in zip(ours.weights, theirs.weights, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_auto_leaves_dense_is_torchs_adamw() -> None:
    run_threads(follow_torch, 2)


def second_moments_after(group: LocalGroup) -> list[float]:
    """The second moment that dense steps go on with, divided by the mean square of averaged gradients."""
    model, betas = Given(SIZES), (0.9, 0.99)
    optimizer = thinwire.AdamW(model, compressor="auto", betas=betas, compressed_betas=(0.5, 0.99), group=group)
    force(optimizer.sync, 0)
    for step in range(OVER_UPDATES):
        take(optimizer, model(gradients(model, group.rank, step)))
    assert optimizer.sync.choice is not None
    found = []
    for number, state in optimizer.state_dict()["state"].items():
        squares = [averages(model, step, group.size)[number].square() for step in range(OVER_UPDATES)]
        mean = torch.stack(squares).mean()
        found.append(float(state["exp_avg_sq"].mean() / (1 - betas[1] ** OVER_UPDATES) / mean))
    return found


def test_second_moments_are_those_of_the_average_again() -> None:
    """All is noise here, so those of single ranks would be twice as large."""
    for found in run_threads(second_moments_after, 2):
        assert all(0.8 < ratio < 1.25 for ratio in found), found


def miss_a_time(group: LocalGroup) -> Choice:
    """The choice if rank 1 could not measure 8 bits, which are slower than dense."""
    model, sync = Given(SIZES), thinwire.Synchronizer("auto", group=group)
    trials: Any = sync.trials
    trials.seconds = lambda: [2.0, float("nan") if group.rank == 1 else 3.0]
    train(sync, model, group, OVER + 1)
    assert sync.choice is not None
    return sync.choice


def test_a_time_that_one_rank_lacks_is_not_averaged() -> None:
    """A missing time counted as 0 would make the average of 8 bits 1.5 s."""
    for choice in run_threads(miss_a_time, 2):
        assert choice.compressor == "none"
        assert "not every compressor could be measured" in choice.reason


def bytes_of_steps(group: LocalGroup) -> list[float]:
    """The share of the dense bytes that each step sends; 8 bits are chosen."""
    model, sync = Given((4000, 8000)), thinwire.Synchronizer("auto", group=group)
    force(sync, 1)
    return [sent / 48_000 for sent in train(sync, model, group, OVER + 2)]


def test_small_tensors_are_dense_until_the_choice_and_compressed_after_it() -> None:
    for shares in run_threads(bytes_of_steps, 2):
        dense, eight, compressed = [1.0] * STEPS, [0.51] * STEPS, [0.26] * 2
        assert shares == pytest.approx([1.0] * BEFORE + (dense + eight) * TURNS + compressed, abs=0.01)
