"""compressor="auto" between ranks: what is measured, that all choose alike, and that nothing is lost on the way.

No test looks at how long anything took: a choice that a test needs is forced, by the numbers that ranks hand in.
"""

import logging
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoints import Run, file_of, run_through
from torch.nn.parallel import DistributedDataParallel

from support.slow import slow
from support.training import (
    SEVERAL,
    Given,
    assert_same,
    attached,
    average,
    average_residuals,
    force,
    gradients,
    identical,
    loss_of,
    make_net,
    policy,
    take,
    weight_bits,
)
from thinwire.compressors import format_spec
from thinwire.sync.auto import BEFORE, GRADIENTS, STEPS, TURNS, updates
from thinwire.testing import RankPool

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


def measure(rank: int, world_size: int, kind: str) -> Any:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("thinwire")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        run = Run(**how(kind, True, 0))
        del run.sync.trials.seconds  # type: ignore[attr-defined]
        run.train(rank, 0, OVER_UPDATES + 1)
    finally:
        logger.removeHandler(handler)
    return run.sync.choice.record(), logged


@pytest.mark.parametrize(("kind", "tried"), [("attach", GRADIENTS), ("AdamW", UPDATES)])
def test_everything_is_measured_and_all_ranks_choose_alike(ranks: RankPool, kind: str, tried: Any) -> None:
    found = ranks.run(measure, 2, kind, timeout=120)
    record, logged = found[0]
    assert identical(one[0] for one in found)
    assert record["candidates"] == list(map(format_spec, tried))
    assert record["compressor"] in record["candidates"]
    assert len(record["step_seconds"]) == len(tried)
    assert all(isfinite(seconds) and seconds > 0 for seconds in record["step_seconds"])
    assert [len(logged) for _, logged in found] == [1, 0]
    assert logged[0] == f"auto: {record['reason']}"


def keep_ledger(rank: int, world_size: int, ddp: bool, best: int, steps: int) -> dict[str, Any]:
    module = Given()
    model, sync, finish = attached(module, policy("auto"), ddp, {"bucket_cap_mb": 0.01})
    force(sync, best)
    came_in = [torch.zeros(weight.numel(), dtype=torch.float64) for weight in module.weights]
    came_out = [torch.zeros(weight.numel(), dtype=torch.float64) for weight in module.weights]
    for step in range(steps):
        model.zero_grad()
        given = gradients(module, rank, step)
        model(given).backward()
        finish()
        for number, weight in enumerate(module.weights):
            came_in[number] += given[number]
            came_out[number] += weight.grad
    residuals = average_residuals(sync)
    for number, one in enumerate(came_in):
        kept = residuals.get(f"weights.{number}", torch.zeros(()))
        torch.testing.assert_close(came_out[number] + kept, average(one), rtol=0, atol=1e-4)
    return {"residuals": sorted(residuals), "norm": sync.residual_norm(), "reason": sync.choice and sync.choice.reason}


@pytest.mark.parametrize(
    ("world_size", "ddp", "best", "steps"),
    [(2, True, 0, OVER - 1), (2, False, 0, OVER + 1), (3, True, 0, OVER + 3), (2, False, 1, OVER + 3)],
)
def test_nothing_is_lost(ranks: RankPool, world_size: int, ddp: bool, best: int, steps: int) -> None:
    for found in ranks.run(keep_ledger, world_size, ddp, best, steps):
        assert (found["norm"] > 0) == (steps < OVER or best == 1)
        assert bool(found["residuals"]) == (steps < OVER or best == 1)  # memory is free again
        assert (found["reason"] is None) == (steps <= OVER)


def see_bits(rank: int, world_size: int, kind: str, ddp: bool, best: int) -> Any:
    run = Run(**how(kind, ddp, best))
    run.train(rank, 0, OVER_UPDATES + 2)
    before, steps = run.bits(), run.sync.steps
    take(run.optimizer, loss_of(run.model, rank, 99) * (float("nan") if rank else 1.0))
    assert run.sync.finite is False
    assert_same(before, run.bits(), "after a step that was to be skipped")
    assert (run.optimizer.skipped, run.sync.steps) == (1, steps)
    run.train(rank, OVER_UPDATES + 2, OVER_UPDATES + 5)
    stats = run.sync.stats
    dense = stats.bytes_dense // (stats.steps + stats.skipped)
    moments = {
        f"{number} {name}": tensor.numpy().tobytes()
        for number, kept in run.optimizer.state_dict()["state"].items()
        for name, tensor in kept.items()
    }
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
    run, twin = Run(**how("attach", True, 0)), DistributedDataParallel(make_net(), **SEVERAL)
    run.train(rank, 0, OVER + 2)
    assert run.sync.last_step.is_sent_by_torch
    twin.module.load_state_dict(run.state()["model"])
    for model in (twin, twin, run.model):  # twice, since DDP then has its buckets
        model.zero_grad()
        loss_of(model, rank, 50).backward()
    for (name, mine), theirs in zip(run.model.module.named_parameters(), twin.module.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_dense_is_that_of_torch(ranks: RankPool) -> None:
    ranks.run(compare_with_torch, 3)


def resume(rank: int, world_size: int, folder: Path, step: int, last: int, how: dict[str, Any]) -> Any:
    """Go on with the states of two ranks; what it had chosen before and after that."""
    run = Run(**how)
    run.load([torch.load(file_of(folder, old * 1000 + step)) for old in range(2)])
    before = run.sync.choice
    run.train(rank, step, last)
    bits = run.bits() if world_size == 2 else weight_bits(run.model)
    return bits, before and before.record(), run.sync.choice.record()


@pytest.mark.parametrize(
    ("kind", "ddp", "best"), [("attach", True, 0), slow("AdamW", True, 0), ("SGD", False, 1)], ids=str
)
def test_a_resumed_run_goes_on_with_the_choice(
    ranks: RankPool, kind: str, ddp: bool, best: int, tmp_path: Path
) -> None:
    over = OVER if kind == "attach" else OVER_UPDATES
    saved_at = [BEFORE + STEPS + 2, over - 2, over, over + 3]
    whole = ranks.run(run_through, 2, tmp_path, saved_at, over + 6, how(kind, ddp, best), timeout=120)
    for step in saved_at:
        again = ranks.run(resume, 2, tmp_path, step, over + 6, how(kind, ddp, best), timeout=120)
        for one, (other, _, _) in zip(whole, again, strict=True):
            assert_same(one, other, f"resumed at {step}")


@pytest.mark.parametrize(("kind", "best"), [("attach", 1), ("AdamW", 2), slow("SGD", 0)])
def test_another_number_of_ranks_measures_again_unless_it_sent_updates(
    ranks: RankPool, kind: str, best: int, tmp_path: Path
) -> None:
    step = OVER_UPDATES + 3
    ranks.run(run_through, 2, tmp_path, [step], step + 1, how(kind, True, best), timeout=120)
    found = ranks.run(resume, 3, tmp_path, step, step + OVER_UPDATES + BEFORE, how(kind, True, best), timeout=120)
    assert identical(found)
    _, before, after = found[0]
    assert before == (after if kind == "AdamW" else None)
