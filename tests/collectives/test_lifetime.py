"""What an operation leaves behind: nothing, neither in this process nor in the store."""

import gc
import os
import threading
import time
import weakref
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from thinwire.collectives.transport import channel
from thinwire.collectives.transport.watch import watch
from thinwire.testing import RankPool, store_barrier

SPEC = "quantize:bits=8"


def call(numel: int = 5000, spec: str = SPEC, **options: Any) -> None:
    tensor = torch.full((numel,), 127.0)
    thinwire.all_reduce_compressed(tensor, spec, **options)
    assert (tensor == 127 * dist.get_world_size(options.get("group"))).all()


class Held(NamedTuple):
    """File descriptors and threads of this process."""

    files: int
    threads: int


def held() -> Held:
    gc.collect()
    return Held(len(os.listdir("/proc/self/fd")), threading.active_count())


ONE = Held(16, 8)
"""More than a group of ours holds, which may be there or not: connections and threads end a little later."""


def within(after: Held, before: Held) -> bool:
    return after.files <= before.files + ONE.files and after.threads <= before.threads + ONE.threads


def held_in_the_end(before: Held) -> Held:
    end = time.monotonic() + 10
    while not within(now := held(), before) and time.monotonic() < end:
        time.sleep(0.05)
    return now


def fail_often(rank: int, world_size: int) -> tuple[Held, Held]:
    tensors = []
    for turn in range(6):
        tensor = torch.ones(9000 + rank)
        tensors.append(weakref.ref(tensor))
        with pytest.raises(thinwire.MismatchError):
            thinwire.all_reduce_compressed(tensor, SPEC, timeout=20.0)
        del tensor
        store_barrier(f"turn {turn}", world_size)
        call()
        if turn == 1:
            before = held()
    after = held_in_the_end(before)
    assert not any(tensor() is not None for tensor in tensors), "a failed call keeps its tensor"
    assert not watch._since
    return before, after


def test_failed_calls_keep_nothing(ranks: RankPool) -> None:
    for before, after in ranks.run(fail_often, 2):
        assert within(after, before), (before, after)  # several more would be held by as many that were kept


def make_and_destroy(rank: int, world_size: int) -> tuple[Held, Held]:
    for turn in range(6):
        group = dist.new_group(list(range(world_size)))
        for spec in (SPEC, "none"):
            call(spec=spec, group=group, timeout=20.0)
        store_barrier(f"turn {turn}", world_size)
        dist.destroy_process_group(group)
        del group
        if turn == 1:
            before = held()
    return before, held_in_the_end(before)


def test_destroyed_groups_keep_nothing(ranks: RankPool) -> None:
    for before, after in ranks.run(make_and_destroy, 3):
        assert within(after, before), (before, after)  # several more would be held by as many that were kept


def live_again(rank: int, world_size: int) -> None:
    """As after a second initialisation on the same store, which under torchrun outlives the group."""
    for life in range(4):
        call(5000 + life % 2)
        if life == 1:
            with pytest.raises(thinwire.MismatchError):
                call(6000 + rank)
        store_barrier(f"life {life}", world_size)
        channel._channels.clear()


def test_what_an_earlier_group_wrote_into_the_store_is_not_read(ranks: RankPool) -> None:
    ranks.run(live_again, 3)


def refuse_the_time_out(rank: int, world_size: int) -> list[float]:
    """A call with a wrong argument counts as a call: the next ones still meet their own."""
    results = []
    for value, timeout in ((1.0, -1.0), (2.0, 20.0)):
        tensor = torch.full((5000,), value)
        expected = ValueError if rank == 1 else thinwire.MismatchError
        if timeout < 0:
            with pytest.raises(expected, match="timeout -1"):
                thinwire.all_reduce_compressed(tensor, SPEC, timeout=timeout if rank == 1 else 20.0)
        else:
            thinwire.all_reduce_compressed(tensor, SPEC, timeout=timeout)
            results.append(float(tensor[0]))
    return results


def test_a_wrong_argument_does_not_shift_the_calls(ranks: RankPool) -> None:
    for results in ranks.run(refuse_the_time_out, 2):
        assert results == [pytest.approx(4.0, rel=0.01)]


def new_shapes(rank: int, world_size: int) -> int:
    counts = []
    for turn in range(40):
        call(5000 + turn)
        if turn in (9, 39):
            store_barrier(f"turn {turn}", world_size)
            counts.append(dist.group.WORLD.get_group_store().num_keys())
            store_barrier(f"counted {turn}", world_size)
    return counts[1] - counts[0]


def test_new_shapes_do_not_fill_the_store(ranks: RankPool) -> None:
    """Thirty more shapes on two ranks: only the slots in which ranks say where they are, and what `meet` writes."""
    for more in ranks.run(new_shapes, 2):
        assert more <= 2 * 30 + 10


def uneven_calls(rank: int, world_size: int) -> None:
    """Ranks of a node whose groups between nodes have seen different numbers of calls."""
    mesh = init_device_mesh("cpu", (2, 2))
    if rank in (0, 2):
        call(group=mesh.get_group(0))
    tensor = torch.ones(9000)
    work = thinwire.all_reduce_compressed(tensor, "randomk:ratio=1/2", torch.zeros(9000), group=mesh, timeout=20.0)
    assert work.report.algorithm == "hierarchical, values"


def test_numbers_of_calls_may_differ_between_groups(ranks: RankPool) -> None:
    ranks.run(uneven_calls, 4)
