"""Handles: many at once, waited for in any order, beside the program's own collectives."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from support.oracle import bytes_of
from support.slow import slow
from thinwire.testing import RankPool

SPECS = ["topk:ratio=1/64,bits=2", "topk:ratio=1/8,bits=32,chunk=64", "quantize:bits=8", "randomk:ratio=1/4", "none"]
ALGORITHMS = ["auto", "gather", "sharded", "dense"]


def start(rank: int, index: int, async_op: bool) -> tuple[Any, Tensor, Tensor]:
    """A call that is drawn from its number, the same on every rank."""
    draw = random.Random(index)
    spec, numel = draw.choice(SPECS), draw.choice([0, 1, 100, 4096, 30_000, 70_001])
    algorithm = draw.choice(ALGORITHMS if spec.startswith(("topk", "quantize")) else ["auto", "gather", "dense"])
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(100 * index + rank))
    residual = torch.zeros(numel)
    work = thinwire.all_reduce_compressed(
        tensor, spec, residual, algorithm=algorithm, key=index, state=thinwire.ShardState(), async_op=async_op
    )
    return work, tensor, residual


def overlap(rank: int, world_size: int, count: int) -> list[bytes]:
    """All at once must give what one by one gives, beside the program's own collectives on the same group."""
    alone, together = [start(rank, index, False) for index in range(count)], []
    for index in range(count):
        together.append(start(rank, index, True))
        own = torch.tensor([float(rank), float(index)])
        dist.all_reduce(own)
        assert own.tolist() == [sum(range(world_size)), index * world_size]
        if index % 8 == rank:
            together[0][0].wait()  # on every rank at another moment
    dist.barrier()
    for index in random.Random(rank).sample(range(count), count):
        assert together[index][0].wait() is True
        assert together[index][0].is_completed()
    for index, (one, other) in enumerate(zip(alone, together, strict=True)):
        for first, second in zip(one[1:], other[1:], strict=True):
            assert bytes_of(first) == bytes_of(second), f"rank {rank}: call {index} differs from the same alone"
    return [bytes_of(tensor) for _, tensor, _ in together]


@pytest.mark.parametrize("world_size", [3, slow(8)])
def test_many_at_once_give_what_one_by_one_gives(ranks: RankPool, world_size: int) -> None:
    first, *others = ranks.run(overlap, world_size, 32)
    assert all(other == first for other in others)


def use_handle(rank: int, world_size: int) -> None:
    tensor = torch.full((3, 2000), 127.0 * (rank + 1))  # eight bits hold it exactly
    total = torch.full((3, 2000), 127.0 * sum(range(1, world_size + 1)))
    work = thinwire.all_reduce_compressed(tensor, "quantize:bits=8", async_op=True)
    halved = work.get_future().then(lambda future: future.value()[0] / 2)
    assert torch.equal(halved.wait(), total / 2)
    assert work.wait() is True
    assert torch.equal(tensor, total)
    (result,) = work.get_future().wait()
    assert result.data_ptr() == tensor.data_ptr()

    for _ in range(3):  # handles that are dropped without waiting still run to their end
        thinwire.all_reduce_compressed(torch.ones(5000), "quantize:bits=8", async_op=True)
    last = torch.full((5000,), 127.0)
    finished = thinwire.all_reduce_compressed(last, "quantize:bits=8")
    assert (last == 127 * world_size).all()
    assert finished.is_completed()
    assert finished.wait() is True
    assert finished.get_future().done()
    assert (finished.report.bytes_sent > 0) == (world_size > 1)


def test_a_handle_has_what_torchs_handles_have(ranks: RankPool) -> None:
    ranks.run(use_handle, 1)
    ranks.run(use_handle, 2)
