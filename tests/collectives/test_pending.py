"""Handles that are under way when something fails: all of them end, on every rank, and the next call works."""

from pathlib import Path
from typing import Any

import pytest

import thinwire
from support.calls import Failure, catch, is_right, reduce, start
from support.processes import run_module, start_module
from support.slow import slow
from thinwire.testing import RankPool, store_barrier


def disagree(rank: int, world_size: int, count: int, odd: int, known: bool, alone: int | None) -> list[str]:
    """Calls at once, of which that of number `odd` is another one on rank 1; what each handle raises.

    known: all of them were called with before. Rank `alone` waits for each before it starts the next.
    """
    sizes = [5000 + index for index in range(count)]
    if known:
        for size in (*sizes, 77):
            reduce(size)
    if rank == 1:
        sizes[odd] = 77
    errors = []
    for group in [[size] for size in sizes] if rank == alone else [sizes]:
        for work, tensor in [start(size) for size in group]:
            failure = catch(work.wait)
            assert failure is not None or is_right(tensor)
            assert work.is_completed()
            errors.append("" if failure is None else failure.error)
    store_barrier("all have failed", world_size)
    reduce()
    return errors


@pytest.mark.parametrize(
    ("world_size", "known", "alone"), [(2, True, None), (3, False, None), (3, False, 0), (3, True, 0)]
)
def test_one_that_differs_ends_those_behind_it(
    ranks: RankPool, world_size: int, known: bool, alone: int | None
) -> None:
    count, odd = (10, 3) if alone is None else (6, 2)
    for rank, errors in enumerate(ranks.run(disagree, world_size, count, odd, known, alone, timeout=15)):
        assert errors[odd] == "MismatchError", f"rank {rank}: {errors}"
        assert alone is None or errors[:odd] == [""] * odd, f"rank {rank}: {errors}"


def fail_inside(rank: int, world_size: int, algorithm: str, sticks: bool) -> Failure:
    """Rank 1 fails in the middle, as when memory runs out; or stands still until the others have given up."""
    reduce(algorithm=algorithm)
    whole = thinwire.Quantize.encode

    def fails(*args: Any, **options: Any) -> Any:
        if not sticks:
            raise MemoryError("no memory left")
        store_barrier("others gave up", world_size)
        return whole(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(thinwire.Quantize, "encode", fails)
        work, _ = start(algorithm=algorithm, timeout=2.5 if sticks else 20.0)
        with pytest.raises((thinwire.CollectiveError, MemoryError)) as caught:
            work.wait()
    if sticks and rank != 1:
        store_barrier("others gave up", world_size)
    store_barrier("all have failed", world_size, seconds=15)  # else someone waited for the time-out
    reduce()
    return Failure(type(caught.value).__name__, str(caught.value), getattr(caught.value, "ranks", ()), 0.0)


@pytest.mark.parametrize(
    ("algorithm", "sticks"), [("gather", False), ("sharded", False), slow("gather", True), ("sharded", True)]
)
def test_a_rank_that_fails_or_stands_still_inside_ends_the_others(
    ranks: RankPool, algorithm: str, sticks: bool
) -> None:
    for rank, failure in enumerate(ranks.run(fail_inside, 3, algorithm, sticks)):
        if rank != 1:
            assert "rank 1" in failure.message, f"rank {rank}: {failure}"
            assert not sticks or (failure.error, failure.ranks) == ("PeerError", (1,)), f"rank {rank}: {failure}"
        elif not sticks:
            assert "no memory left" in failure.message, failure


@pytest.mark.parametrize("inside", [False, slow(True)])
def test_a_process_can_end_while_a_handle_is_under_way(tmp_path: Path, inside: bool) -> None:
    """It would otherwise hang for as long as the group's time-out, half an hour, after any exception."""
    path, when = tmp_path / "store", "inside" if inside else "after"
    other = start_module("leaving_rank", path, 1, when)
    try:
        assert run_module("leaving_rank", path, 0, when, time_limit=50) == "left"
    finally:
        other.communicate(timeout=30)
