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


def make_jobs(count: int, seed: int) -> list[tuple[str, str, int]]:
    """(spec, algorithm, numel); the same on every rank."""
    draw = random.Random(seed)
    jobs = []
    for _ in range(count):
        spec = draw.choice(SPECS)
        algorithm = draw.choice(ALGORITHMS if spec.startswith(("topk", "quantize")) else ["auto", "gather", "dense"])
        jobs.append((spec, algorithm, draw.choice([0, 1, 100, 4096, 30_000, 70_001])))
    return jobs


def start(rank: int, index: int, job: tuple[str, str, int], async_op: bool) -> tuple[Any, Tensor, Tensor]:
    spec, algorithm, numel = job
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(100 * index + rank))
    residual = torch.zeros(numel)
    work = thinwire.all_reduce_compressed(
        tensor, spec, residual, algorithm=algorithm, key=index, state=thinwire.ShardState(), async_op=async_op
    )
    return work, tensor, residual


def overlap(rank: int, world_size: int, count: int) -> list[tuple[bytes, bytes]]:
    """All at once must give what one by one gives; the order of waiting is another on every rank."""
    jobs = make_jobs(count, seed=world_size)
    alone = [start(rank, index, job, False) for index, job in enumerate(jobs)]
    together = [start(rank, index, job, True) for index, job in enumerate(jobs)]
    order = list(range(count))
    random.Random(rank).shuffle(order)
    for index in order:
        assert together[index][0].wait() is True
        assert together[index][0].is_completed()
    for job, one, other in zip(jobs, alone, together, strict=True):
        for first, second in zip(one[1:], other[1:], strict=True):
            assert bytes_of(first) == bytes_of(second), f"rank {rank}: {job} differs from the same alone"
    return [(bytes_of(tensor), bytes_of(residual)) for _, tensor, residual in together]


@pytest.mark.parametrize("world_size", [3, slow(8)])
def test_many_at_once_give_what_one_by_one_gives(ranks: RankPool, world_size: int) -> None:
    found = ranks.run(overlap, world_size, 32)
    for results in zip(*found, strict=True):
        assert len({result for result, _ in results}) == 1


def interleave(rank: int, world_size: int) -> None:
    """The program's own collectives between starting and waiting, on the same group and in the main thread."""
    for step in range(10):
        works = []
        for index, spec in enumerate(SPECS):
            works.append(start(rank, 10 * step + index, (spec, "auto", 20_000), True)[0])
            own = torch.tensor([float(rank), float(step)])
            dist.all_reduce(own)
            assert own.tolist() == [sum(range(world_size)), step * world_size]
            if index == rank % len(SPECS):
                works[0].wait()  # on every rank at another moment
        dist.barrier()
        for work in reversed(works):
            work.wait()
        gathered = [torch.empty(1) for _ in range(world_size)]
        dist.all_gather(gathered, torch.tensor([float(rank)]))
        assert [int(other) for other in gathered] == list(range(world_size))


def use_handle(rank: int, world_size: int) -> None:
    tensor = torch.full((3, 2000), 127.0 * (rank + 1))  # eight bits hold it exactly
    total = 127.0 * sum(range(1, world_size + 1))
    work = thinwire.all_reduce_compressed(tensor, "quantize:bits=8", async_op=True)
    halved = work.get_future().then(lambda future: future.value()[0] / 2)
    assert torch.equal(halved.wait(), torch.full((3, 2000), total / 2))
    assert work.wait() is True
    assert torch.equal(tensor, torch.full((3, 2000), total))
    (result,) = work.get_future().wait()
    assert result.data_ptr() == tensor.data_ptr()

    finished = thinwire.all_reduce_compressed(torch.ones(5000), "quantize:bits=8")
    assert finished.is_completed()
    assert finished.wait() is True
    assert finished.get_future().done()
    assert (finished.report.bytes_sent > 0) == (world_size > 1)

    for _ in range(3):  # handles that are dropped without waiting still run to their end
        thinwire.all_reduce_compressed(torch.ones(5000), "quantize:bits=8", async_op=True)
    last = torch.full((5000,), 127.0)
    thinwire.all_reduce_compressed(last, "quantize:bits=8").wait()
    assert (last == 127 * world_size).all()


def test_a_handle_has_what_torchs_handles_have_and_the_programs_own_collectives_may_run_beside(ranks: RankPool) -> None:
    ranks.run(use_handle, 1)
    ranks.run(use_handle, 2)
    ranks.run(interleave, 3)
