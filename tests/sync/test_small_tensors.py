"""Small tensors are sent together, in 8 bits with a residual: bytes as counted, and neighbours left alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.training import Given, gradients, take
from thinwire import Collective
from thinwire.collectives import LocalGroup, cost
from thinwire.testing import RankPool, run_threads

SIZES = (5000, 10, 4000, 8192, 5, 1300)
SMALL = 10 + 4000 + 5 + 1300
"""Two records, which are sharded between three ranks."""
TOPK = "topk:ratio=1/64,bits=2"


def bytes_of_a_step(rank: int, world_size: int, ddp: bool, small_compressor: str) -> tuple[int, int, int]:
    """(bytes of a step, those of the large tensors by formula, those of the small ones by formula)"""
    model: Any = Given(SIZES)
    called = DistributedDataParallel(model) if ddp else model
    optimizer = thinwire.SGD(
        called,
        lr=1e-3,
        compressor=thinwire.Policy(TOPK, small_compressor=small_compressor),
        collective=Collective(algorithm="gather"),
    )
    for step in range(4):
        take(optimizer, called(gradients(model, rank, step)))
    large, small = thinwire.compressor(TOPK), thinwire.compressor(small_compressor)
    # The last tensors come first, and small ones between two large ones are zeros in their slice.
    elements = sum(SIZES) - SIZES[-1] - SIZES[-2]
    large_bytes = cost.gather(large, elements, torch.float32, world_size).sent
    by = [cost.gather(small, SMALL, torch.float32, world_size).sent]
    if world_size > 2:
        by.append(cost.sharded(small, small, SMALL, torch.float32, world_size).sent)
    return optimizer.sync.stats.last_bytes_sent, round(large_bytes), round(min(by))


@pytest.mark.parametrize(
    ("world_size", "ddp", "by"), [(2, True, "quantize:bits=8"), (3, False, "quantize:bits=8"), (2, True, "none")]
)
def test_their_bytes_are_those_of_eight_bits_or_of_float32(
    ranks: RankPool, world_size: int, ddp: bool, by: str
) -> None:
    found = ranks.run(bytes_of_a_step, world_size, ddp, by)
    _, large, small = found[0]
    assert sum(sent for sent, _, _ in found) / world_size == pytest.approx(large + small, abs=1.0)
    assert small == 4 * SMALL if by == "none" else small < SMALL * 2 * (1 + world_size % 2)


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
