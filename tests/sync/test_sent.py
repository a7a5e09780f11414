"""What a step sends: small tensors together, in 8 bits with a residual; buckets together; new draws at every step."""

from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from support.by_threads import by_threads
from support.oracle import bytes_of
from support.training import Given, averaged, gradients
from thinwire import Collective
from thinwire.collectives import LocalGroup, cost
from thinwire.optim import base
from thinwire.sync import buckets
from thinwire.testing import run_threads

SIZES = (5000, 10, 4000, 8192, 5, 1300)
SMALL = 10 + 4000 + 5 + 1300
"""Two records, which are sharded between three ranks."""
TOPK = "topk:ratio=1/64,bits=2"


def bytes_of_a_step(group: LocalGroup, small_compressor: str) -> tuple[int, int]:
    """(bytes, messages) that a rank sends in a step."""
    model, rules = Given(SIZES), thinwire.Policy(TOPK, small_compressor=small_compressor)
    sync = thinwire.Synchronizer(rules, group=group, collective=Collective(algorithm="gather"))
    for step in range(4):
        averaged(sync, **{str(n): drawn for n, drawn in enumerate(gradients(model, group.rank, step))})
    return sync.stats.last_bytes_sent, sync.stats.messages // 4


@pytest.mark.parametrize(
    ("world_size", "by"), [(2, "quantize:bits=8"), (3, "quantize:bits=8"), (2, "none"), (3, "none")]
)
def test_their_bytes_are_those_of_eight_bits_or_of_float32(world_size: int, by: str) -> None:
    """Between two ranks they are one message, without compression too."""
    large, small = thinwire.compressor(TOPK), thinwire.compressor(by)
    # The last tensors come first, and small ones between two large ones are zeros in their slice.
    elements = sum(SIZES) - SIZES[-1] - SIZES[-2]
    large_bytes = cost.gather(large, elements, torch.float32, world_size).sent
    small_bytes = cost.gather(small, SMALL, torch.float32, world_size).sent
    if world_size > 2:
        small_bytes = min(small_bytes, cost.sharded(small, small, SMALL, torch.float32, world_size).sent)
    found = run_threads(bytes_of_a_step, world_size, by)
    assert sum(sent for sent, _ in found) / world_size == pytest.approx(large_bytes + small_bytes, abs=1.0)
    dense = 2 * 4 * SMALL * (world_size - 1) / world_size
    assert small_bytes == dense if by == "none" else small_bytes < dense / 2
    assert world_size > 2 or [messages for _, messages in found] == [2, 2]


LARGE_SMALL_LARGE = (4096, 100, 4096)


def large_in_a_gap(rank: int, step: int, factor: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    large, small, other = (torch.randn(size, generator=generator) for size in LARGE_SMALL_LARGE)
    return [large, factor * small, other]


def train_around_a_gap(group: LocalGroup, kind: str, factor: float) -> tuple[Tensor, Tensor]:
    """What the two large parameters become, if the gradients of the small one are so many times as large."""
    model, policy = Given(LARGE_SMALL_LARGE), thinwire.Policy("topk:ratio=1/16,bits=32,chunk=512", min_numel=1000)
    if kind == "synchronizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = thinwire.Synchronizer(policy, group=group)
    else:
        options = {"warmup_steps": 1} if kind == "AdamW" else {}
        optimizer = getattr(thinwire, kind)(model, lr=0.1, compressor=policy, group=group, **options)
    for step in range(6):
        optimizer.zero_grad()
        model(large_in_a_gap(group.rank, step, factor)).backward()
        if kind == "synchronizer":
            sync.all_reduce_gradients(model)
        optimizer.step()
    return model.weights[0].detach(), model.weights[2].detach()


def test_gaps_take_nothing_from_their_neighbours() -> None:
    """Large gradients in a gap would be among the largest of their chunk, and be sent instead of others."""
    for kind in ("synchronizer", "SGD", "AdamW"):
        ordinary, large = (run_threads(train_around_a_gap, 2, kind, factor)[0] for factor in (1.0, 1000.0))
        for one, other in zip(ordinary, large, strict=True):
            assert torch.equal(one, other), kind


# Buckets that are sent together have the bits of one bucket, and fewer operations than buckets sent alone -------------

TOGETHER = (5000, 100, 4096, 7000, 30, 9000, 300)
STEPS = 8


def train_together(group: LocalGroup, poisoned: int | None, options: dict[str, Any]) -> tuple[list[bytes], int, int]:
    """The bits of weights, residuals and moments; the operations of the last step; the steps that were skipped."""
    model = Given(TOGETHER)
    policy = thinwire.Policy("topk:ratio=1/16,bits=2,chunk=512", min_numel=1000, warmup=[(2, "none")])
    optimizer = thinwire.AdamW(model, lr=0.1, compressor=policy, group=group, refresh_every=4, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + group.rank)
        gradients = [torch.randn(size, generator=generator) for size in TOGETHER]
        if step == poisoned and group.rank == 1:
            gradients[3][17] = torch.nan
        model(gradients).backward()
        optimizer.step()
    moments = [
        kept for vectors in optimizer._parameters.vectors.values() for _, kept in sorted(vectors.named().items())
    ]
    residuals = [kept for _, kept in sorted(optimizer.sync.residuals.items())]
    bits = [bytes_of(tensor.detach()) for tensor in (*model.weights, *moments, *residuals)]
    return bits, len(optimizer.sync.last_step.reports), optimizer.skipped


@pytest.mark.parametrize(
    ("options", "poisoned"),
    [({"max_grad_norm": 0.5}, 5), ({"collective": Collective(algorithm="sharded")}, None)],
    ids=str,
)
def test_bits_are_those_of_one_bucket(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], poisoned: int | None
) -> None:
    whole = run_threads(train_together, 2, poisoned, options)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 20_000)
    monkeypatch.setitem(base.TOGETHER_BYTES, "cpu", 0)
    alone = run_threads(train_together, 2, poisoned, options)
    monkeypatch.setitem(base.TOGETHER_BYTES, "cpu", 1 << 20)
    together = run_threads(train_together, 2, poisoned, options)
    monkeypatch.setitem(base.TOGETHER_BYTES, "cpu", 40_000)
    assert alone[0][1] > run_threads(train_together, 2, poisoned, options)[0][1] > together[0][1]
    for mine, one_bucket, several in zip(together, whole, alone, strict=True):
        assert mine == one_bucket
        assert several[1] > mine[1]  # operations
        assert mine[2] == (poisoned is not None)


# Random draws: new ones at every step and of each slice ---------------------------------------------------------------

NUMEL = 8192
RANDOMK = thinwire.Policy("randomk:ratio=1/8", min_numel=0)


@by_threads(2)
def test_random_k_reaches_nearly_all_elements(group: LocalGroup) -> None:
    """One of eight is left out by all 40 steps with a probability of (7/8) ** 40 = 0.5 %."""
    sync, total = thinwire.Synchronizer(RANDOMK, group=group), torch.zeros(NUMEL)
    for _ in range(40):
        total += averaged(sync, weight=torch.ones(NUMEL))["weight"]
    assert 0.985 < float(total.count_nonzero()) / NUMEL < 1.0


@by_threads(2)
def test_slices_draw_on_their_own(group: LocalGroup) -> None:
    """The elements sent of two tensors of one size, which are not in one slice because of their dtypes."""
    sync = thinwire.Synchronizer(RANDOMK, group=group)
    found = averaged(sync, one=torch.ones(NUMEL), other=torch.ones(NUMEL, dtype=torch.float64))
    one, other = found["one"] != 0, found["other"] != 0
    assert int(one.sum()) == int(other.sum()) == NUMEL // 8
    assert 0.05 < float((one & other).sum()) / int(one.sum()) < 0.25, "one in eight is in both by chance"
