"""A rank that is lost or late: the others get an error that names it, in time, and no rank hangs."""

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import thinwire
from support.calls import Failure, catch, reduce, start
from support.processes import run_module, start_module
from support.slow import slow
from thinwire.collectives.transport.board import Board
from thinwire.testing import LOST, RankPool, store_barrier

NUMEL = 200_000


def die_in_segment(segment: int) -> None:
    """This process ends when it has begun to encode its n-th segment: in the middle of an exchange, at any speed."""
    encode = thinwire.Quantize.encode
    left = [segment]

    def encode_or_die(self: Any, *args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, *args, **options)

    thinwire.Quantize.encode = encode_or_die  # type: ignore[method-assign]


def lose(rank: int, world_size: int, victim: int, when: str, algorithm: str, folder: Path) -> Any:
    """One call that works, one in which `victim` dies, and one among those who are left."""
    options = {"max_bytes": 1_000_000, "timeout": 20.0, "algorithm": algorithm}
    reduce(NUMEL, **options)
    if rank == victim:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        die_in_segment(3)
    failure = catch(lambda: reduce(NUMEL, **options))
    survivors = [other for other in range(world_size) if other != victim]
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "survivors"), len(survivors))
    dist.init_process_group("gloo", store=store, rank=survivors.index(rank), world_size=len(survivors))
    reduce(NUMEL, **options)
    return failure


@pytest.mark.parametrize(
    ("world_size", "victim", "when", "algorithm", "store"),
    [
        (3, 2, "inside", "gather", "parent"),
        (3, 0, "inside", "sharded", "rank0"),
        (3, 1, "before", "sharded", "parent"),
        (2, 0, "before", "gather", "rank0"),
        (4, 3, "inside", "sharded", "parent"),
        slow(8, 5, "inside", "gather", "parent"),
    ],
)
def test_a_killed_rank_is_named_by_the_others(
    ranks: RankPool, tmp_path: Path, world_size: int, victim: int, when: str, algorithm: str, store: str
) -> None:
    found = ranks.run(lose, world_size, victim, when, algorithm, tmp_path, store=store, lost=[victim])
    for rank, answer in enumerate(found):
        if rank == victim:
            assert answer is LOST
            continue
        assert answer is not None, f"rank {rank} did not notice"
        assert (answer.error, answer.ranks) == ("PeerError", (victim,)), answer
        assert answer.seconds < 15, answer
        assert f"rank {victim}" in answer.message, answer
        assert f"rank {rank}" in answer.message, answer


def fall_behind(rank: int, world_size: int, late: int, where: str, algorithm: str) -> Failure | None:
    """Rank `late` calls, or goes on inside of its call, when the others have given up. Handles raise, not the calls."""
    if where != "at the first use":
        reduce(NUMEL, algorithm=algorithm)
    store_barrier("start", world_size)
    encode = thinwire.Quantize.encode

    def encode_late(*args: Any, **options: Any) -> Any:
        store_barrier("others gave up", world_size)
        return encode(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        if rank == late and where == "inside":
            patch.setattr(thinwire.Quantize, "encode", encode_late)
        elif rank == late:
            store_barrier("others gave up", world_size)
        work, _ = start(NUMEL, algorithm=algorithm, timeout=2.5)
        failure = catch(work.wait)
    if rank != late:
        assert catch(work.wait) is not None, "again, and not only once"
        assert work.is_completed()
        with pytest.raises(RuntimeError, match=f"rank {late}"):
            work.get_future().wait()
        store_barrier("others gave up", world_size)
    store_barrier("all are done", world_size, seconds=15)
    reduce(NUMEL, algorithm=algorithm)
    return failure


@pytest.mark.parametrize(
    ("world_size", "late", "where", "algorithm"),
    [
        (2, 1, "before", "gather"),
        slow(3, 0, "at the first use", "sharded"),
        slow(3, 2, "before", "sharded"),
        slow(2, 0, "at the first use", "dense"),
        slow(3, 1, "inside", "gather"),
        (3, 1, "inside", "sharded"),
    ],
)
def test_a_late_rank_is_named_by_the_others(
    ranks: RankPool, world_size: int, late: int, where: str, algorithm: str
) -> None:
    for rank, failure in enumerate(ranks.run(fall_behind, world_size, late, where, algorithm)):
        if rank != late:
            assert failure is not None, f"rank {rank} did not notice"
            assert (failure.error, failure.ranks) == ("PeerError", (late,)), failure
            assert f"rank {late}" in failure.message, failure
        assert where == "inside" or failure is not None, f"rank {rank} did not notice"
        assert failure is None or failure.seconds < 8, failure


def lose_the_store(rank: int, world_size: int, folder: Path) -> Failure | None:
    """Rank 0 dies, and its store with it, so that nobody can leave a notice. Rank 1 calls when rank 2 has seen that,
    and has closed its connections: it is not to be named."""
    reduce(NUMEL)
    seen = folder / "seen"
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 30
    while rank == 1 and not seen.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    failure = catch(lambda: reduce(NUMEL, timeout=20.0))
    seen.touch()
    return failure


def call_without_a_store(rank: int, world_size: int, folder: Path) -> Failure | None:
    """Rank 0, which runs the store, ends between two calls. The next one has to compare its arguments by the store."""
    reduce(64, timeout=30.0)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        while store.add("over", 0) < world_size - 1:
            time.sleep(0.01)
        os._exit(0)
    store.add("over", 1)
    with suppress(RuntimeError):
        while True:
            store.add("is anybody there", 1)
    return catch(lambda: reduce(65, timeout=30.0))


def die_before_a_new_call(rank: int, world_size: int, folder: Path) -> Failure | None:
    """The others have come to the first use of a call, for which nothing is exchanged until all have come."""
    reduce(64)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait([f"rank {other} waits" for other in range(world_size) if other != rank], timedelta(seconds=30))
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"rank {rank} waits", "")
    return catch(lambda: reduce(65, timeout=600.0))


def die_comparing(rank: int, world_size: int, folder: Path) -> Failure | None:
    """The last rank to come compares the calls of all. It dies before it has written what it found."""
    reduce(64, timeout=30.0)
    if rank == 1:
        write, store = Board.write, dist.distributed_c10d._get_default_store()
        store.wait(["the others have come"], timedelta(seconds=30))

        def write_or_die(board: Board, key: str, text: str) -> None:
            if key.startswith("verdict/"):
                os.kill(os.getpid(), signal.SIGKILL)
            write(board, key, text)

        Board.write = write_or_die  # type: ignore[method-assign]
    else:
        count = Board.count

        def count_and_say(board: Board, key: str) -> int:
            counted = count(board, key)
            if key.startswith("arrived/") and counted == world_size - 1:
                dist.distributed_c10d._get_default_store().set("the others have come", "")
            return counted

        Board.count = count_and_say  # type: ignore[method-assign]
    return catch(lambda: reduce(65, timeout=3.0))


@pytest.mark.parametrize(
    ("scene", "victim", "store", "words"),
    [
        (lose_the_store, 0, "rank0", "rank 0 is lost"),
        (call_without_a_store, 0, "rank0", ""),
        (die_before_a_new_call, 1, "parent", "rank 1 is lost"),
        (die_comparing, 1, "parent", ""),
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_a_rank_that_died_is_named_alone(
    ranks: RankPool, tmp_path: Path, scene: Any, victim: int, store: str, words: str
) -> None:
    """Long before the time-out, where it is long."""
    found = ranks.run(scene, 3, tmp_path, store=store, lost=[victim], timeout=60.0)
    for rank, failure in enumerate(found):
        if rank != victim:
            assert failure is not None, f"rank {rank} did not notice"
            assert failure.ranks == (victim,), failure
            assert words in failure.message, failure


def fail_inside(rank: int, world_size: int, algorithm: str) -> str:
    """Rank 1 fails in the middle, as when memory runs out."""
    reduce(algorithm=algorithm)

    def fails(*args: Any, **options: Any) -> Any:
        raise MemoryError("no memory left")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(thinwire.Quantize, "encode", fails)
        work, _ = start(algorithm=algorithm, timeout=20.0)
        with pytest.raises((thinwire.CollectiveError, MemoryError)) as caught:
            work.wait()
    store_barrier("all have failed", world_size, seconds=15)  # else someone waited for the time-out
    reduce()
    return str(caught.value)


@pytest.mark.parametrize("algorithm", ["gather", "sharded"])
def test_a_rank_that_fails_inside_ends_the_others(ranks: RankPool, algorithm: str) -> None:
    for rank, message in enumerate(ranks.run(fail_inside, 3, algorithm)):
        assert ("no memory left" if rank == 1 else "rank 1") in message, f"rank {rank}: {message}"


@pytest.mark.parametrize("inside", [False, slow(True)])
def test_a_process_can_end_while_a_handle_is_under_way(tmp_path: Path, inside: bool) -> None:
    """It would otherwise hang for as long as the group's time-out, half an hour, after any exception."""
    path, when = tmp_path / "store", "inside" if inside else "after"
    other = start_module("leaving_rank", path, 1, when)
    try:
        assert run_module("leaving_rank", path, 0, when, time_limit=50) == "left"
    finally:
        other.communicate(timeout=30)
