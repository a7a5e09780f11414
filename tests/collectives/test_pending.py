"""Handles that are under way when something fails: all of them end, on every rank, and the next call works."""

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from support.processes import run_module, start_module
from support.slow import slow
from thinwire.testing import RankPool, store_barrier

SPEC = "quantize:bits=8"


def start(numel: int, async_op: bool = True, **options: Any) -> tuple[Any, torch.Tensor]:
    tensor = torch.full((numel,), 127.0)  # eight bits hold it exactly
    return thinwire.all_reduce_compressed(tensor, SPEC, async_op=async_op, **options), tensor


def works(world_size: int) -> None:
    work, tensor = start(5000)
    work.wait()
    assert (tensor == 127 * world_size).all()


def count_errors(started: list[tuple[Any, torch.Tensor]], world_size: int) -> list[str]:
    """What each handle raises; those that do not must have the right sum."""
    found = []
    for work, tensor in started:
        try:
            work.wait()
        except thinwire.CollectiveError as error:
            found.append(type(error).__name__)
        else:
            assert (tensor == 127 * world_size).all()
            found.append("")
        assert work.is_completed()
    return found


def sizes_of(rank: int, count: int, odd: int, known: bool) -> list[int]:
    """What to call with: rank 1 has another size at `odd`. If known, all of them were called with before."""
    sizes = [5000 + index for index in range(count)]
    if known:
        for size in (*sizes, 77):
            start(size, async_op=False)
    if rank == 1:
        sizes[odd] = 77
    return sizes


def disagree(rank: int, world_size: int, known: bool) -> list[str]:
    """Ten calls at once, of which the fourth is another one on rank 1."""
    sizes = sizes_of(rank, 10, 3, known)
    found = count_errors([start(size) for size in sizes], world_size)
    store_barrier("all have failed", world_size)
    works(world_size)
    return found


@pytest.mark.parametrize(("world_size", "known"), [(2, True), (3, False)])
def test_one_that_differs_ends_those_behind_it(ranks: RankPool, world_size: int, known: bool) -> None:
    found = ranks.run(disagree, world_size, known, timeout=15)
    for rank, errors in enumerate(found):
        assert errors[3] == "MismatchError", f"rank {rank}: {errors}"


def disagree_and_go_on(rank: int, world_size: int, known: bool) -> list[str]:
    """The same, but rank 0 waits for each before it starts the next, while the others start all at once."""
    sizes = sizes_of(rank, 6, 2, known)
    if rank == 0:
        found = []
        for size in sizes:
            found += count_errors([start(size)], world_size)
    else:
        found = count_errors([start(size) for size in sizes], world_size)
    store_barrier("all have failed", world_size)
    works(world_size)
    return found


@pytest.mark.parametrize("known", [False, True])
def test_a_rank_joins_the_others_again_after_an_error(ranks: RankPool, known: bool) -> None:
    for rank, errors in enumerate(ranks.run(disagree_and_go_on, 3, known, timeout=15)):
        assert errors[:2] == ["", ""], f"rank {rank}: {errors}"
        assert errors[2] == "MismatchError", f"rank {rank}: {errors}"


def break_inside(rank: int, world_size: int, algorithm: str) -> str:
    """Rank 1 fails by itself in the middle, as it would when memory runs out."""
    start(5000, async_op=False, algorithm=algorithm)
    whole = thinwire.Quantize.encode
    if rank == 1:

        def fails(*args: Any, **options: Any) -> Any:
            raise MemoryError("no memory left")

        thinwire.Quantize.encode = fails  # type: ignore[method-assign]
    try:
        work, _ = start(5000, algorithm=algorithm, timeout=20.0)
        with pytest.raises((thinwire.CollectiveError, MemoryError)) as caught:
            work.wait()
    finally:
        thinwire.Quantize.encode = whole  # type: ignore[method-assign]
    store_barrier("all have failed", world_size, seconds=15)  # else someone waited for the time-out
    works(world_size)
    return str(caught.value)


def test_a_rank_that_fails_inside_ends_the_others(ranks: RankPool) -> None:
    for algorithm in ("gather", "sharded"):
        for rank, message in enumerate(ranks.run(break_inside, 3, algorithm)):
            assert ("no memory left" if rank == 1 else "rank 1") in message, f"rank {rank}, {algorithm}"


def stick_inside(rank: int, world_size: int, algorithm: str) -> str:
    """Rank 1 stands still in the middle until the others have given up, then goes on."""
    start(5000, async_op=False, algorithm=algorithm)
    whole = thinwire.Quantize.encode
    if rank == 1:

        def waits(*args: Any, **options: Any) -> Any:
            store_barrier("others gave up", world_size)
            return whole(*args, **options)

        thinwire.Quantize.encode = waits  # type: ignore[method-assign]
    try:
        work, _ = start(5000, algorithm=algorithm, timeout=2.5)
        with pytest.raises(thinwire.CollectiveError) as caught:
            work.wait()
    finally:
        thinwire.Quantize.encode = whole  # type: ignore[method-assign]
    if rank != 1:
        store_barrier("others gave up", world_size)
    store_barrier("all have failed", world_size)
    works(world_size)
    assert rank == 1 or caught.value.ranks == (1,), str(caught.value)
    return type(caught.value).__name__


@pytest.mark.parametrize("algorithm", [slow("gather"), "sharded"])
def test_a_rank_that_stands_still_inside_is_named(ranks: RankPool, algorithm: str) -> None:
    found = ranks.run(stick_inside, 3, algorithm)
    assert found[0] == found[2] == "PeerError"


@pytest.mark.parametrize("inside", [False, slow(True)])
def test_a_process_can_end_while_a_handle_is_under_way(tmp_path: Path, inside: bool) -> None:
    """It would otherwise hang for as long as the group's time-out, half an hour, after any exception."""
    path, when = tmp_path / "store", "inside" if inside else "after"
    other = start_module("leaving_rank", path, 1, when)
    try:
        assert run_module("leaving_rank", path, 0, when, time_limit=50) == "left"
    finally:
        other.communicate(timeout=30)
