"""A rank that is lost or late: the others get an error that names it, in time, and no rank hangs."""

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import thinwire
from support.slow import slow
from thinwire.collectives.transport.board import Board
from thinwire.testing import LOST, RankPool, store_barrier

TOPK = "topk:ratio=1/64,bits=2"
NUMEL = 200_000


class Failure(NamedTuple):
    error: str
    message: str
    ranks: tuple[int, ...]
    seconds: float


def reduce(world_size: int, algorithm: str = "gather", **options: Any) -> Failure | None:
    """What goes wrong in one call; its sum is checked."""
    started = time.monotonic()
    tensor = torch.full((NUMEL,), 127.0)  # eight bits hold it exactly
    try:
        thinwire.all_reduce_compressed(tensor, "quantize:bits=8", algorithm=algorithm, **options)
    except thinwire.CollectiveError as error:
        return Failure(type(error).__name__, str(error), error.ranks, time.monotonic() - started)
    assert (tensor == 127 * world_size).all()
    return None


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
    options = {"max_bytes": 1_000_000, "timeout": 20.0}
    assert reduce(world_size, algorithm, **options) is None
    if rank == victim:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        die_in_segment(3)
    failure = reduce(world_size, algorithm, **options)
    survivors = [other for other in range(world_size) if other != victim]
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "survivors"), len(survivors))
    dist.init_process_group("gloo", store=store, rank=survivors.index(rank), world_size=len(survivors))
    return failure, reduce(len(survivors), algorithm, **options)


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
        failure, afterwards = answer
        assert failure is not None, f"rank {rank} did not notice"
        assert failure.error == "PeerError", failure
        assert failure.ranks == (victim,), failure
        assert failure.seconds < 15, failure
        for word in (f"rank {victim}", f"rank {rank}"):
            assert word in failure.message, failure
        assert afterwards is None, f"rank {rank} in the new group: {afterwards}"


def lose_the_store(rank: int, world_size: int, folder: Path) -> Failure | None:
    """Rank 0 dies, and its store with it. Rank 1 calls when rank 2 has seen that, and has closed its connections."""
    assert reduce(world_size) is None
    seen = folder / "seen"
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 30
    while rank == 1 and not seen.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    failure = reduce(world_size, timeout=20.0)
    seen.touch()
    return failure


def test_a_rank_that_only_closes_is_not_named_for_the_one_that_died_with_the_store(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Nobody can leave a notice then."""
    for failure in ranks.run(lose_the_store, 3, tmp_path, store="rank0", lost=[0])[1:]:
        assert failure is not None
        assert failure.ranks == (0,), failure
        assert "rank 0 is lost" in failure.message, failure


def come_late(rank: int, world_size: int, late: int, new: bool, algorithm: str) -> list[Failure | None]:
    """Rank `late` calls only when the others have given up; then all call together."""
    found = []
    if not new:
        assert reduce(world_size, algorithm) is None
    store_barrier("start", world_size)
    if rank == late:
        store_barrier("others gave up", world_size)
    found.append(reduce(world_size, algorithm, timeout=2.5))
    if rank != late:
        store_barrier("others gave up", world_size)
    store_barrier("all are done", world_size)
    found.append(reduce(world_size, algorithm))
    return found


@pytest.mark.parametrize(
    ("world_size", "late", "new", "algorithm"),
    [(2, 1, False, "gather"), slow(3, 0, True, "sharded"), slow(3, 2, False, "sharded"), slow(2, 0, True, "dense")],
)
def test_a_late_rank_is_named_by_the_others(
    ranks: RankPool, world_size: int, late: int, new: bool, algorithm: str
) -> None:
    for rank, (failure, afterwards) in enumerate(ranks.run(come_late, world_size, late, new, algorithm)):
        assert failure is not None, f"rank {rank} did not notice"
        assert failure.seconds < 8, failure
        if rank != late:
            assert failure.error == "PeerError", failure
            assert failure.ranks == (late,), failure
            assert f"rank {late}" in failure.message, failure
        assert afterwards is None, f"rank {rank}: {afterwards}"


def wait_late(rank: int, world_size: int) -> list[Failure | None]:
    """The same with a handle: the error comes from wait(), and from the future, not from the call."""
    if rank == 1:
        store_barrier("others gave up", world_size)
        return []
    tensor = torch.ones(NUMEL)
    work = thinwire.all_reduce_compressed(tensor, TOPK, async_op=True, timeout=2.0)
    with pytest.raises(thinwire.PeerError, match="rank 1"):
        work.wait()
    with pytest.raises(thinwire.PeerError, match="rank 1"):  # and again, and not only once
        work.wait()
    assert work.is_completed()
    with pytest.raises(RuntimeError, match="rank 1"):
        work.get_future().wait()
    store_barrier("others gave up", world_size)
    return []


def test_a_handle_raises_when_it_is_waited_for(ranks: RankPool) -> None:
    assert ranks.run(wait_late, 2) == [[], []]


def call_without_a_store(rank: int, world_size: int) -> tuple[tuple[int, ...], str]:
    """Rank 0, which runs the store, ends between two calls. The next one has to compare its arguments by the store."""
    thinwire.all_reduce_compressed(torch.ones(64), "none", timeout=30.0)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        while store.add("over", 0) < world_size - 1:
            time.sleep(0.01)
        os._exit(0)
    store.add("over", 1)
    with suppress(RuntimeError):
        while True:
            store.add("is anybody there", 1)
    with pytest.raises(thinwire.PeerError) as caught:
        thinwire.all_reduce_compressed(torch.ones(65), "none", timeout=30.0)
    return caught.value.ranks, str(caught.value)


def test_a_rank_that_took_the_store_with_it_is_named(ranks: RankPool) -> None:
    for named, text in ranks.run(call_without_a_store, 3, lost=[0], store="rank0")[1:]:
        assert named == (0,), text


def die_before_a_new_call(rank: int, world_size: int) -> tuple[tuple[int, ...], str]:
    """The others have come to the first use of a call, for which nothing is exchanged until all have come."""
    thinwire.all_reduce_compressed(torch.ones(64), "quantize:bits=8")
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait([f"rank {other} waits" for other in range(world_size) if other != rank], timedelta(seconds=30))
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"rank {rank} waits", "")
    with pytest.raises(thinwire.PeerError) as caught:
        thinwire.all_reduce_compressed(torch.ones(65), "quantize:bits=8", timeout=600.0)
    return caught.value.ranks, str(caught.value)


def test_a_rank_that_dies_before_a_new_call_is_named_long_before_the_time_out(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(die_before_a_new_call, 3, lost=[1], timeout=60.0)):
        assert found is LOST or (found[0] == (1,) and "rank 1 is lost" in found[1]), (rank, found)


def die_comparing(rank: int, world_size: int) -> tuple[tuple[int, ...], str]:
    """The last rank to come compares the calls of all. It dies before it has written what it found."""
    thinwire.all_reduce_compressed(torch.ones(64), "quantize:bits=8", timeout=30.0)
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
    with pytest.raises(thinwire.CollectiveError) as caught:
        thinwire.all_reduce_compressed(torch.ones(65), "quantize:bits=8", timeout=3.0)
    return caught.value.ranks, str(caught.value)


def test_a_rank_that_dies_before_it_has_compared_the_calls_is_named(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(die_comparing, 3, lost=[1])):
        assert found is LOST or found[0] == (1,), (rank, found)
