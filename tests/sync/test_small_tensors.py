"""Small tensors are sent together, in 8 bits with a residual: bytes as counted, nothing lost, exact on request."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.training import Given, gradients, take
from thinwire.collectives import cost
from thinwire.testing import RankPool

SIZES = (5000, 10, 4000, 8192, 5, 1300)
SMALL = 10 + 4000 + 5 + 1300
"""Two records, which are sharded between three ranks."""
TOPK = "topk:ratio=1/64,bits=2"


def bytes_of_a_step(rank: int, world_size: int, ddp: bool, small_compressor: str) -> tuple[int, int, int]:
    """(bytes of a step, those of the large tensors by formula, those of the small ones by formula)"""
    model: Any = Given(SIZES)
    called = DistributedDataParallel(model) if ddp else model
    optimizer = thinwire.SGD(
        called, lr=1e-3, compressor=thinwire.Policy(TOPK, small_compressor=small_compressor), algorithm="gather"
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
