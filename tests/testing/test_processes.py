"""The harness itself: a test whose ranks cannot make it fail would prove nothing."""

import os
import signal
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.testing import LOST, RankError, RankPool


def add_ranks(rank: int, world_size: int, start: int) -> int:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return int(total)


def raise_in_a_training(rank: int, world_size: int) -> None:
    """Rank 0 raises with a model in its hands, whose connections the others wait on."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    thinwire.attach(model, "quantize:bits=8")
    for step in range(3):
        if rank == 0 and step == 2:
            raise KeyError("the reason")
        model(torch.ones(1, 64)).sum().backward()


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def raise_on(rank: int, world_size: int, guilty: int) -> None:
    if rank == guilty:
        raise KeyError("the reason")


def warn_on(rank: int, world_size: int, guilty: int) -> None:
    if rank == guilty:
        warnings.warn("the warning", stacklevel=2)


def die_on(rank: int, world_size: int, guilty: int) -> str:
    if rank == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hang_on(rank: int, world_size: int, guilty: int) -> None:
    if rank == guilty:
        threading.Event().wait(60)


def test_results_come_in_the_order_of_ranks(ranks: RankPool) -> None:
    for store in ("parent", "rank0"):
        assert ranks.run(add_ranks, 3, 10, store=store) == [33, 33, 33]
    assert ranks.run(add_ranks, 1, 10) == [10]


def test_processes_are_used_again(ranks: RankPool) -> None:
    first = ranks.run(process_id, 2)
    assert len(set(first)) == 2
    assert ranks.run(process_id, 3)[:2] == first


@pytest.mark.parametrize(("function", "reason"), [(raise_on, "KeyError: 'the reason'"), (warn_on, "the warning")])
def test_an_exception_reaches_the_test_with_its_rank(ranks: RankPool, function: object, reason: str) -> None:
    with pytest.raises(RankError, match=reason) as caught:
        ranks.run(function, 3, 1)  # type: ignore[arg-type]
    assert caught.value.ranks == [1]
    assert "rank 1 of 3 raised\nTraceback" in str(caught.value)
    assert ranks.run(add_ranks, 3, 0) == [3, 3, 3]


def test_a_rank_that_raises_in_a_training_ends_the_others(ranks: RankPool) -> None:
    """Its connections are closed at once, those of thinwire among them: nobody waits for a time-out."""
    with pytest.raises(RankError, match="rank 0 of 2 raised") as caught:
        ranks.run(raise_in_a_training, 2)
    assert "KeyError: 'the reason'" in str(caught.value)
    assert "did not end" not in str(caught.value)


def test_a_killed_rank_is_reported_and_replaced(ranks: RankPool) -> None:
    before = ranks.run(process_id, 3)
    with pytest.raises(RankError, match="rank 2 of 3 died with exit code -9") as caught:
        ranks.run(die_on, 3, 2)
    assert caught.value.ranks == [2]
    assert ranks.run(add_ranks, 3, 0) == [3, 3, 3]
    assert not set(before) & set(ranks.run(process_id, 3))


def test_a_rank_that_is_meant_to_die_leaves_a_mark(ranks: RankPool) -> None:
    assert ranks.run(die_on, 2, 0, lost=[0]) == [LOST, "alive"]
    with pytest.raises(RankError, match="rank 1 of 2 answered 'alive', expected it to die"):
        ranks.run(die_on, 2, 5, lost=[1])


def test_a_rank_that_hangs_is_reported_with_where_it_stood(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 did not answer within 2 s") as caught:
        ranks.run(hang_on, 2, 1, timeout=2)
    assert "in hang_on" in str(caught.value)
    assert ranks.run(add_ranks, 2, 0) == [1, 1]


def gather_shards(rank: int, world_size: int, groups_before: int) -> list[float]:
    """DTensors on a mesh whose groups have other names if there were other groups before them."""
    for _ in range(groups_before):
        dist.new_group(list(range(world_size)))
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))["shard"]
    shard = DTensor.from_local(torch.tensor([float(rank)]), mesh, [Shard(0)], run_check=False)
    return [float(value) for value in torch.zeros_like(shard).full_tensor()]


def test_a_later_run_does_not_find_the_meshes_of_an_earlier_one(ranks: RankPool) -> None:
    for groups_before in (0, 3, 1):
        assert ranks.run(gather_shards, 4, groups_before) == [[0.0, 0.0]] * 4
