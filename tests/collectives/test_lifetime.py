"""What an operation leaves behind: nothing, neither in this process nor in the store."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from support.calls import reduce
from thinwire.collectives.transport import channel
from thinwire.collectives.transport.watch import watch
from thinwire.testing import RankPool, store_barrier


def held() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


ONE = 16, 8
"""More than a group of ours holds, which may be there or not: connections and threads end a little later."""


def keep_nothing(world_size: int, job: Callable[[int], None]) -> None:
    """Six times the same: after two of them as much is held as after all."""
    for turn in range(6):
        job(turn)
        store_barrier(f"turn {turn}", world_size)
        reduce()
        if turn == 1:
            before = held()
    end = time.monotonic() + 10
    while any(after > once + one for after, once, one in zip(held(), before, ONE, strict=True)):
        assert time.monotonic() < end, (before, held())  # several more are held by as many that were kept
        time.sleep(0.05)


def failed_calls_keep_nothing(rank: int, world_size: int) -> None:
    tensors = []

    def fail(turn: int) -> None:
        tensor = torch.ones(9000 + rank)
        tensors.append(weakref.ref(tensor))
        with pytest.raises(thinwire.MismatchError):
            thinwire.all_reduce_compressed(tensor, "quantize:bits=8", timeout=20.0)

    keep_nothing(world_size, fail)
    assert not any(tensor() is not None for tensor in tensors), "a failed call keeps its tensor"
    assert not watch._since


def destroyed_groups_keep_nothing(rank: int, world_size: int) -> None:
    def make(turn: int) -> None:
        group = dist.new_group(list(range(world_size)))
        reduce(group=group, timeout=20.0)
        thinwire.all_reduce_compressed(torch.ones(5000), "none", group=group, timeout=20.0)
        store_barrier(f"made {turn}", world_size)
        dist.destroy_process_group(group)

    keep_nothing(world_size, make)


def what_an_earlier_group_wrote_is_not_read(rank: int, world_size: int) -> None:
    """As after a second initialisation on the same store, which under torchrun outlives the group."""
    for life in range(4):
        reduce(5000 + life % 2)
        if life == 1:
            with pytest.raises(thinwire.MismatchError):
                reduce(6000 + rank)
        store_barrier(f"life {life}", world_size)
        channel._channels.clear()


def new_shapes_do_not_fill_the_store(rank: int, world_size: int) -> None:
    """Thirty more shapes on two ranks: only the slots in which ranks say where they are, and what `meet` writes."""
    counts = []
    for turn in range(40):
        reduce(5000 + turn)
        if turn in (9, 39):
            store_barrier(f"turn {turn}", world_size)
            counts.append(dist.group.WORLD.get_group_store().num_keys())
            store_barrier(f"counted {turn}", world_size)
    assert counts[1] - counts[0] <= 2 * 30 + 10


def numbers_of_calls_may_differ_between_groups(rank: int, world_size: int) -> None:
    """Ranks of a node whose groups between nodes have seen different numbers of calls."""
    mesh = init_device_mesh("cpu", (2, 2))
    if rank in (0, 2):
        reduce(group=mesh.get_group(0))
    tensor = torch.ones(9000)
    work = thinwire.all_reduce_compressed(tensor, "randomk:ratio=1/2", torch.zeros(9000), group=mesh, timeout=20.0)
    assert work.report.algorithm == "hierarchical, values"


@pytest.mark.parametrize(
    ("scene", "world_size"),
    [
        (failed_calls_keep_nothing, 2),
        (destroyed_groups_keep_nothing, 3),
        (what_an_earlier_group_wrote_is_not_read, 3),
        (new_shapes_do_not_fill_the_store, 2),
        (numbers_of_calls_may_differ_between_groups, 4),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_scenes(ranks: RankPool, scene: Any, world_size: int) -> None:
    ranks.run(scene, world_size)


def test_the_watch_keeps_nothing_of_an_operation_that_has_ended() -> None:
    looked = threading.Event()
    operation = type("Slow", (), {"check_others": lambda self: looked.set()})()
    watch.begin(operation)
    assert looked.wait(30)
    watch.end(operation)
    left = weakref.ref(operation)
    del operation
    deadline = time.monotonic() + 10
    while left() is not None:
        assert time.monotonic() < deadline, "the thread keeps it"
        gc.collect()
        time.sleep(0.02)
