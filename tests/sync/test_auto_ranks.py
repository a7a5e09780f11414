"""compressor="auto" between ranks: what is measured, that all choose alike, and that nothing is lost on the way.

No test looks at how long anything took: a choice that a test needs is forced, by the numbers that ranks hand in.
"""

import copy
import logging
from math import isfinite
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.by_threads import by_threads
from support.group import run_group
from support.run import Run, resume, save
from support.slow import slow
from support.training import (
    SEVERAL,
    Given,
    assert_same,
    attached,
    force,
    gradients,
    identical,
    loss_of,
    make_net,
    policy,
    read,
    take,
    weight_bits,
)
from thinwire import Collective
from thinwire.collectives import LocalGroup
from thinwire.compressors import format_spec
from thinwire.sync.auto import BEFORE, GRADIENTS, STEPS, TURNS, updates
from thinwire.testing import RankPool, run_threads

UPDATES = updates(2)
"""What two ranks may send updates by."""

OVER = BEFORE + TURNS * STEPS * len(GRADIENTS)
"""Steps after which gradients have been tried."""
OVER_UPDATES = BEFORE + TURNS * STEPS * len(UPDATES)
OPTIONS: dict[str, dict[str, Any]] = {
    "attach": {}, "AdamW": {"warmup_steps": 2}, "SGD": {"warmup_steps": 2, "momentum": 0.9}
}  # fmt: skip


def how(kind: str, ddp: bool, best: int) -> dict[str, Any]:
    """A training by auto, with a choice that is forced."""
    return {"kind": kind, "ddp": ddp, "best": best, **OPTIONS[kind]}


def measure(group: LocalGroup, kind: str) -> dict[str, Any]:
    run = Run(group.rank, kind, compressor=policy("auto"), group=group, **OPTIONS[kind])
    run.train(0, OVER_UPDATES + 1)
    return run.sync.choice.record()


@pytest.mark.parametrize(("kind", "tried"), [("attach", GRADIENTS), ("AdamW", UPDATES)])
def test_everything_is_measured_and_all_ranks_choose_alike(
    caplog: pytest.LogCaptureFixture, kind: str, tried: Any
) -> None:
    with caplog.at_level(logging.INFO, "thinwire"):
        record, other = run_threads(measure, 2, kind)
    assert record == other
    assert record["candidates"] == list(map(format_spec, tried))
    assert record["compressor"] in record["candidates"]
    assert len(record["step_seconds"]) == len(tried)
    assert all(isfinite(seconds) and seconds > 0 for seconds in record["step_seconds"])
    assert caplog.messages == [f"auto: {record['reason']}"], "of one rank"


def see_bits(rank: int, world_size: int, kind: str, ddp: bool, best: int) -> Any:
    run = Run(rank, **how(kind, ddp, best))
    run.train(0, OVER_UPDATES + 2)
    before, steps = run.bits(), run.sync.steps
    take(run.optimizer, loss_of(run.model, rank, 99) * (float("nan") if rank else 1.0))
    assert run.sync.finite is False
    assert_same(before, run.bits(), "after a step that was to be skipped")
    assert (run.optimizer.skipped, run.sync.steps) == (1, steps)
    run.train(OVER_UPDATES + 2, OVER_UPDATES + 5)
    stats = run.sync.stats
    dense = stats.bytes_dense // (stats.steps + stats.skipped)
    moments = {name: bits for name, bits in run.bits().items() if not name.startswith(("sync", "weight"))}
    return weight_bits(run.model), moments, stats.last_bytes_sent / dense


@pytest.mark.parametrize(("kind", "best", "ddp"), [("AdamW", 0, True), ("AdamW", 1, False), ("SGD", 2, True)])
def test_replicas_stay_identical_and_bytes_are_those_of_the_choice(
    ranks: RankPool, kind: str, best: int, ddp: bool
) -> None:
    found = ranks.run(see_bits, 2, kind, ddp, best)
    assert identical(weights for weights, _, _ in found)
    assert identical(moments for _, moments, _ in found) == (best == 0)  # once momentum was averaged, it stays the same
    low, high = [(0.99, 1.01), (0.2, 0.35), (0.0, 0.15)][best]
    assert all(low < share < high for _, _, share in found)


def compare_with_torch(rank: int, world_size: int) -> None:
    """Once dense is chosen, gradients have the bits of DDP without a hook, which their steps are as quick as."""
    run, twin = Run(rank, **how("attach", True, 0)), DistributedDataParallel(make_net(), **SEVERAL)
    run.train(0, OVER + 2)
    assert run.sync.last_step.is_sent_by_torch
    twin.module.load_state_dict(run.state()["model"])
    for model in (twin, twin, run.model):  # twice, since DDP then has its buckets
        model.zero_grad()
        loss_of(model, rank, 50).backward()
    for (name, mine), theirs in zip(run.model.module.named_parameters(), twin.module.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_dense_is_that_of_torch(ranks: RankPool) -> None:
    ranks.run(compare_with_torch, 3)


@pytest.mark.parametrize(
    ("kind", "ddp", "best"), [("attach", True, 0), slow("AdamW", True, 0), ("SGD", False, 1)], ids=str
)
def test_a_resumed_run_goes_on_with_the_choice(ranks: RankPool, kind: str, ddp: bool, best: int) -> None:
    over = OVER if kind == "attach" else OVER_UPDATES
    saved_at = [BEFORE + STEPS + 2, over - 2, over, over + 3]
    ranks.run(resume, 2, how(kind, ddp, best), saved_at, over + 6, timeout=120)


def go_on(rank: int, world_size: int, how: dict[str, Any], saved: list[bytes], step: int) -> Any:
    """(the weights in the end, what had been chosen before, and what is after that)"""
    run = Run(rank, **how)
    run.load([read(state) for state in saved])
    before = run.sync.choice
    run.train(step, step + OVER_UPDATES + BEFORE)
    return weight_bits(run.model), before and before.record(), run.sync.choice.record()


@pytest.mark.parametrize(("kind", "best"), [("attach", 1), ("AdamW", 2), slow("SGD", 0)])
def test_another_number_of_ranks_measures_again_unless_it_sent_updates(ranks: RankPool, kind: str, best: int) -> None:
    given, step = how(kind, True, best), OVER_UPDATES + 3
    saved = ranks.run(save, 2, given, step, timeout=120)
    found = ranks.run(go_on, 3, given, saved, step, timeout=120)
    assert identical(found)
    _, before, after = found[0]
    assert before == (after if kind == "AdamW" else None)


# Between threads, after dense was chosen: nothing is lost on the way back, and steps are those of torch ---------------

SIZES = (6000, 8192)
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


def go_back(rank: int, world_size: int, kind: str, ddp: bool = False, group: Any = None) -> None:
    """Weights of SGD are minus the sum of all averages once dense is chosen, however they were sent before."""
    module, collective = Given(SIZES), Collective(algorithm="sharded", shard_compressor=OF_SUMS)
    options: dict[str, Any] = {"group": group, "collective": collective}
    if kind == "attach":
        model, sync, finish = attached(module, "auto", ddp, {"bucket_cap_mb": 0.01}, **options)
        optimizer, steps = torch.optim.SGD(module.parameters(), lr=0.5), OVER + 2
    else:
        optimizer = thinwire.SGD(module, lr=0.5, compressor="auto", warmup_steps=2, warmup="none", **options)
        model, sync, finish, steps = module, optimizer.sync, lambda: None, OVER_UPDATES + 2
    force(sync, 0)
    came_in = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    for step in range(steps):
        optimizer.zero_grad()
        model(gradients(module, rank, step)).backward()
        finish()
        optimizer.step()
        for total, mean in zip(came_in, averages(module, step, world_size), strict=True):
            total += mean
    assert sync.choice is not None
    assert not sync.residuals, "memory is free again"
    # An optimizer tries 8 bits without a residual: in 8 steps an element errs by 0.02 or so.
    close = 1e-3 if kind == "attach" else 0.15
    for weight, total in zip(module.weights, came_in, strict=True):
        torch.testing.assert_close(weight.detach().double(), -0.5 * total, rtol=1e-5, atol=close)


def test_auto_sends_what_owners_have_when_it_goes_back_to_dense(ranks: RankPool) -> None:
    run_group(go_back, 2, "attach")
    ranks.run(go_back, 3, "attach", True)


def test_auto_applies_what_owners_have_when_it_goes_back_to_dense() -> None:
    run_group(go_back, 2, "SGD")


@by_threads(2)
def test_what_auto_leaves_dense_is_torchs_adamw(group: LocalGroup) -> None:
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


@by_threads(2)
def test_second_moments_are_those_of_the_average_again(group: LocalGroup) -> None:
    """All is noise here, so those of single ranks would be twice as large."""
    model, betas = Given(SIZES), (0.9, 0.99)
    optimizer = thinwire.AdamW(model, compressor="auto", betas=betas, compressed_betas=(0.5, 0.99), group=group)
    force(optimizer.sync, 0)
    for step in range(OVER_UPDATES):
        take(optimizer, model(gradients(model, group.rank, step)))
    assert optimizer.sync.choice is not None
    for number, state in optimizer.state_dict()["state"].items():
        squares = [averages(model, step, group.size)[number].square() for step in range(OVER_UPDATES)]
        ratio = state["exp_avg_sq"].mean() / (1 - betas[1] ** OVER_UPDATES) / torch.stack(squares).mean()
        assert 0.8 < float(ratio) < 1.25, number


@by_threads(2)
def test_a_time_that_one_rank_lacks_is_not_averaged(group: LocalGroup) -> None:
    """Rank 1 could not measure 8 bits, which are slower than dense. As 0 s it would make their average 1.5 s."""
    model, sync = Given(SIZES), thinwire.Synchronizer("auto", group=group)
    trials: Any = sync.trials
    trials.seconds = lambda: [2.0, float("nan") if group.rank == 1 else 3.0]
    train(sync, model, group, OVER + 1)
    assert sync.choice is not None
    assert sync.choice.compressor == "none"
    assert "not every compressor could be measured" in sync.choice.reason


@by_threads(2)
def test_small_tensors_are_dense_until_the_choice_and_compressed_after_it(group: LocalGroup) -> None:
    """Shares of the dense bytes that each step sends; 8 bits are chosen."""
    model, sync = Given((4000, 8000)), thinwire.Synchronizer("auto", group=group)
    force(sync, 1)
    shares = [sent / 48_000 for sent in train(sync, model, group, OVER + 2)]
    dense, eight, compressed = [1.0] * STEPS, [0.51] * STEPS, [0.26] * 2
    assert shares == pytest.approx([1.0] * BEFORE + (dense + eight) * TURNS + compressed, abs=0.01)
