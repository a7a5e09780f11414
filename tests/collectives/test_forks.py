"""Forked children, such as the workers of a DataLoader: connections and exit handlers belong to the process that made
them."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from thinwire.collectives.transport.watch import watch
from thinwire.testing import LOST, RankPool

NUMEL = 4096
SECONDS = 30


def forked(target: Callable[..., object], *args: Any) -> Any:
    """Start a process by fork. Ranks of the pool are daemons, which multiprocessing allows no children."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    child = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    child.start()
    return child


def fork_while_in_flight(rank: int, world_size: int) -> tuple[list[int | None], list[float]]:
    thinwire.all_reduce_compressed(torch.ones(NUMEL), "quantize:bits=8")  # connects
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.full((NUMEL,), float(rank + 1))
    codes = []
    if rank == 0:
        work = thinwire.all_reduce_compressed(tensor, "quantize:bits=8", async_op=True)
        deadline = time.monotonic() + SECONDS
        while not watch._since:
            assert time.monotonic() < deadline, "the exchange is not in flight"
        for _ in range(3):
            child = forked(os.getpid)
            child.join(SECONDS)
            codes.append(child.exitcode)
            (operation,) = watch._since
            assert operation._connection.reported_error() is None  # type: ignore[attr-defined]
        store.set("forked", "")
    else:
        store.get("forked")  # so that rank 0 waits for this rank while its children end
        work = thinwire.all_reduce_compressed(tensor, "quantize:bits=8", async_op=True)
    work.wait()
    thinwire.all_reduce_compressed(tensor, "quantize:bits=8")
    return codes, tensor.unique().round(decimals=1).tolist()


def test_forked_child_that_ends_leaves_an_exchange_in_flight_alone(ranks: RankPool) -> None:
    results = ranks.run(fork_while_in_flight, 2, timeout=2 * SECONDS)
    assert results == [([0, 0, 0], [6.0]), ([], [6.0])]


def wait_for_signal() -> None:
    signal.alarm(3 * SECONDS)  # ends it if the test does not
    signal.pause()


def die_with_a_living_child(rank: int, world_size: int) -> tuple[int, ...]:
    thinwire.all_reduce_compressed(torch.ones(NUMEL), "quantize:bits=8")
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("child", str(forked(wait_for_signal).pid))
        store.get("waits")
        os.kill(os.getpid(), signal.SIGKILL)
    work = thinwire.all_reduce_compressed(torch.ones(NUMEL), "quantize:bits=8", async_op=True)
    child = int(store.get("child"))
    store.set("waits", "")
    try:
        with pytest.raises(thinwire.PeerError) as caught:
            work.wait()
    finally:
        os.kill(child, signal.SIGKILL)
    return caught.value.ranks


def test_killed_rank_is_named_while_a_forked_child_of_it_lives(ranks: RankPool) -> None:
    """Before the time-out of the group, which is twice that of the run."""
    assert ranks.run(die_with_a_living_child, 2, lost=[1], timeout=SECONDS, group_timeout=2 * SECONDS) == [(1,), LOST]


def use_in_the_child(results: Any) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(NUMEL)
    thinwire.all_reduce_compressed(tensor, "quantize:bits=8")
    results.send(tensor.unique().round(decimals=1).tolist())


def train_in_a_child(rank: int, world_size: int) -> list[float]:
    thinwire.all_reduce_compressed(torch.ones(NUMEL), "quantize:bits=8")
    ours, theirs = multiprocessing.Pipe()
    child = forked(use_in_the_child, theirs)
    assert ours.poll(SECONDS), "the child did not answer"
    result: list[float] = ours.recv()
    child.join(SECONDS)
    assert child.exitcode == 0
    thinwire.all_reduce_compressed(torch.ones(NUMEL), "quantize:bits=8")
    return result


def test_forked_child_can_use_a_group_of_its_own(ranks: RankPool) -> None:
    assert ranks.run(train_in_a_child, 2, timeout=2 * SECONDS) == [[1.0], [1.0]]
