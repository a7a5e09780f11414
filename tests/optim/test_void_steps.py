"""A NaN on one rank, in whichever bucket: the step is void on every rank, and the next one is as if it had not been."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.optimizers import make
from support.training import (
    SEVERAL,
    SPECS,
    VIEWS,
    Given,
    assert_same,
    grad_bits,
    gradients,
    identical,
    loss_of,
    make_net,
    no_sync,
    optimizer_bits,
    policy,
    sync_bits,
    take,
    weight_bits,
)
from thinwire import Collective
from thinwire.testing import RankPool

SIZES = (2048, 2048, 10, 3000, 700, 2048)
"""Four of them fill a bucket each."""


def places(layout: list[list[str]]) -> list[int]:
    """The numbers of weights of the first bucket, of one in the middle, of the last; and of the small one."""
    assert len(layout) >= 3, layout
    names = [layout[0][0], layout[len(layout) // 2][-1], layout[-1][-1], "weights.2"]
    return [int(name.removeprefix("weights.")) for name in names]


def make_run(kind: str, algorithm: str, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(model, optimizer, synchronizer): an optimizer of thinwire, or by a spec of SPECS torch's with `attach`."""
    model = DistributedDataParallel(Given(SIZES), **options)
    if kind in ("AdamW", "SGD"):
        optimizer = make(kind, model, warmup_steps=4, collective=Collective(algorithm=algorithm))
        return model, optimizer, optimizer.sync
    sync = thinwire.attach(model, policy(SPECS[kind][0]), collective=Collective(algorithm=algorithm))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), sync


def bits(model: Any, optimizer: Any, sync: thinwire.Synchronizer) -> dict[str, bytes]:
    if isinstance(optimizer, (thinwire.AdamW, thinwire.SGD)):
        return optimizer_bits(optimizer)
    moments = {f"moment {n}": kept["momentum_buffer"] for n, kept in optimizer.state_dict()["state"].items()}
    return weight_bits(model) | sync_bits(sync) | {name: moment.numpy().tobytes() for name, moment in moments.items()}


def spoil(rank: int, world_size: int, kind: str, algorithm: str, options: dict[str, Any]) -> dict[str, bytes]:
    """In the warm-up of an optimizer, and after it; the run beside it never meets a NaN."""
    runs = [make_run(kind, algorithm, options) for _ in range(2)]
    (model, optimizer, sync), void = runs[0], 0
    for step in range(8):
        for place in places(sync.state_dict()["layout"]) if step in (3, 6) else ():
            before = bits(*runs[0])
            given = gradients(model.module, rank, 500 + step)
            if rank == world_size - 1:
                given[place][3] = torch.nan
            optimizer.zero_grad()
            model(given).backward()
            if kind in ("AdamW", "SGD"):
                optimizer.step()
            else:
                assert all(bool(parameter.grad.isnan().all()) for parameter in model.parameters())
            void += 1
            assert sync.finite is False
            assert (sync.stats.skipped, sync.steps) == (void, step)
            assert_same(before, bits(*runs[0]), f"step {step}, weight {place}")
        for other, stepper, _ in runs:
            take(stepper, other(gradients(other.module, rank, step)))
        assert sync.finite is True
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        assert_same(*(bits(*run) for run in runs), f"the runs with and without a NaN, after step {step}")
    assert void == 8
    assert sync.residual_norm() > 0
    return weight_bits(model)


@pytest.mark.parametrize(
    ("kind", "algorithm", "options"),
    [
        ("AdamW", "gather", SEVERAL),
        ("AdamW", "sharded", VIEWS),
        ("SGD", "sharded", SEVERAL),
        ("topk", "sharded", VIEWS),
        ("quantize", "auto", SEVERAL),
    ],
    ids=lambda value: ("views" if value is VIEWS else "copies") if isinstance(value, dict) else value,
)
def test_a_nan_in_any_bucket_voids_the_step(
    ranks: RankPool, kind: str, algorithm: str, options: dict[str, Any]
) -> None:
    assert identical(ranks.run(spoil, 3, kind, algorithm, options))


def compare_with_alone(rank: int, world_size: int, kind: str, options: dict[str, Any] | None) -> None:
    """A second backward pass, of a copy that no DDP knows, says what this rank's gradient is; of every other step, in
    two parts."""
    module = make_net()
    model: Any = module if options is None else DistributedDataParallel(module, **options)
    optimizer = make(kind, model, warmup_steps=3, max_grad_norm=0.05)
    for step in range(8):
        alone = copy.deepcopy(module)
        for one in (alone, model):
            one.zero_grad()
            for part in reversed(range(1 + step % 2)):
                with no_sync(one) if part else nullcontext():
                    loss = loss_of(one, rank, 10 * step + part)
                    (loss * torch.nan if rank == 0 and step in (2, 5) else loss).backward()
        if options is None:
            optimizer.exchange()
        assert_same(grad_bits(alone), grad_bits(model), f"gradients before step {step}")
        optimizer.step()
        assert_same(grad_bits(alone), grad_bits(model), f"gradients after step {step}")
        assert (optimizer.sync.finite is False) == (step in (2, 5))
    assert (optimizer.sync.steps, optimizer.skipped) == (6, 2)


@pytest.mark.parametrize(
    ("kind", "options"), [("AdamW", SEVERAL), ("SGD", VIEWS), ("AdamW", None)], ids=["copies", "views", "plain"]
)
def test_grad_stays_the_gradient_of_this_rank(ranks: RankPool, kind: str, options: dict[str, Any] | None) -> None:
    ranks.run(compare_with_alone, 2, kind, options)
