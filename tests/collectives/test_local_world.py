"""Ranks as threads: the same sums, bytes and errors as between processes, without torch.distributed."""

import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from support.oracle import same_bits
from support.reductions import Case, perform
from thinwire.collectives.local import LocalGroup, LocalWorld
from thinwire.collectives.transport import operation
from thinwire.collectives.transport.link import LinkBroken
from thinwire.collectives.transport.local_link import LocalLink, Switchboard
from thinwire.testing import run_threads

NUMEL = 20_000
TOPK, EIGHT_BITS = "topk:ratio=1/64,bits=2", "quantize:bits=8"
SECONDS = 30.0


def test_ranks_that_take_turns_have_the_same_sums() -> None:
    cases = [Case(TOPK, "sharded", (NUMEL,), average=True, steps=range(3))]
    free, in_turn = (
        run_threads(lambda group: perform(group.rank, group.size, cases, group=group)[0], 5, turns=turns)
        for turns in (False, True)
    )
    assert not dist.is_initialized(), "torch.distributed is not needed"
    for one, other in zip(free, in_turn, strict=True):
        assert all(map(same_bits, one.results, other.results))
        assert same_bits(one.residual, other.residual)


# What goes wrong ----------------------------------------------------------------------------------------------------


def caught(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def test_a_record_of_an_earlier_operation_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the board are used again. A rank that is late has left the record of an earlier call under the key."""
    monkeypatch.setattr(operation, "_SLOTS", 1)

    def work(group: LocalGroup) -> Exception | None:
        def call(spec: str, timeout: float) -> None:
            thinwire.all_reduce_compressed(torch.ones(NUMEL), spec, group=group, timeout=timeout)

        call(TOPK, SECONDS)
        call(EIGHT_BITS, SECONDS)
        return None if group.rank == 1 else caught(lambda: call(TOPK, 1.5))

    error, _ = LocalWorld(2, timeout=SECONDS).run(work)
    assert isinstance(error, thinwire.PeerError), error
    assert error.ranks == (1,)
    assert "it has not reached this operation" in str(error)


def test_a_rank_that_raises_does_not_keep_the_others() -> None:
    """Neither in an all-reduce nor at a barrier."""
    echoes = []

    def work(group: LocalGroup, at_barrier: bool) -> None:
        if group.rank == 1:
            raise KeyError("no more data")
        if at_barrier:
            group.barrier()
        with pytest.raises(thinwire.CollectiveError) as echo:
            thinwire.all_reduce_compressed(torch.ones(9), EIGHT_BITS, group=group)
        echoes.append(str(echo.value))

    for at_barrier, turns in ((False, False), (True, False), (True, True)):
        with pytest.raises(KeyError, match="no more data") as failure:
            LocalWorld(3, timeout=SECONDS, turns=turns).run(work, at_barrier)
        assert failure.value.__notes__ == ["On rank 1 of 3."]
    assert len(echoes) == 2
    assert all("rank 1: it ended with KeyError('no more data')" in echo for echo in echoes), echoes


def test_wrong_worlds_and_groups_are_refused() -> None:
    for size in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match="expected a whole number from 1 up"):
            LocalWorld(size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        thinwire.all_reduce_compressed(torch.ones(9), TOPK, group=LocalWorld(2))  # type: ignore[arg-type]


# The link alone -----------------------------------------------------------------------------------------------------


def _bytes(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def test_a_link_that_is_closed_wakes_everybody() -> None:
    board = Switchboard(3)
    links = [LocalLink(board, rank) for rank in range(3)]
    found: dict[int, LinkBroken] = {}

    def wait(rank: int) -> None:
        buffers = {2: _bytes(4)}
        try:
            links[rank].post(buffers if rank else {}, {} if rank else buffers, 7)(time.monotonic() + 30, int)
        except LinkBroken as broken:
            found[rank] = broken

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    links[2].close()
    for thread in threads:
        thread.join(10)
    assert {(rank, broken.peer, broken.late) for rank, broken in found.items()} == {(0, 2, False), (1, 2, False)}
    with pytest.raises(LinkBroken, match="rank 2 closed the connection"):
        links[0].post({1: _bytes(4)}, {}, 8)(time.monotonic() + 30, int)


def test_a_message_of_another_size_is_refused_and_the_deadline_is_kept() -> None:
    board, started = Switchboard(2), time.monotonic()
    with pytest.raises(LinkBroken, match="no message in time") as broken:
        LocalLink(Switchboard(2), 0).post({}, {1: _bytes(4)}, 7)(started + 0.2, int)
    assert (broken.value.peer, broken.value.late) == (1, True)
    assert 0.2 <= time.monotonic() - started < 5
    post = LocalLink(board, 0).post
    sender = threading.Thread(target=caught, args=(lambda: post({1: _bytes(4)}, {}, 7)(started + 20, int),))
    sender.start()
    link = LocalLink(board, 1)
    with pytest.raises(LinkBroken, match="4 bytes came, expected 5"):
        link.post({}, {0: _bytes(5)}, 7)(started + 20, int)
    link.close()
    sender.join(10)
    assert not sender.is_alive()


def test_nothing_is_left_behind() -> None:
    before = set(threading.enumerate())
    world = LocalWorld(4)
    world.run(lambda group: thinwire.all_reduce_compressed(torch.ones(NUMEL), EIGHT_BITS, group=group).wait())
    made = [thread for thread in threading.enumerate() if thread not in before and "thinwire-wire" in thread.name]
    assert made
    del world
    deadline = time.monotonic() + 30
    while any(thread.is_alive() for thread in made):
        assert time.monotonic() < deadline, [thread.name for thread in made if thread.is_alive()]
        gc.collect()  # again and again: a thread may have been at the end of its last call
        time.sleep(0.02)


def test_worlds_stay_apart_and_each_compressor_counts_its_own_calls() -> None:
    """Equal compressors too, whose plans are the same."""
    worlds = [LocalWorld(2, timeout=SECONDS) for _ in range(2)]

    def both(group: LocalGroup) -> tuple[float, list[int]]:
        tensor, mine = torch.full((3000,), 127.0), [thinwire.Quantize(bits=8) for _ in range(2)]
        for world, compressor in zip(worlds, mine, strict=True):
            thinwire.all_reduce_compressed(tensor, compressor, group=world.groups[group.rank])
        thinwire.all_reduce_compressed(torch.ones(3000), mine[1], group=worlds[0].groups[group.rank])
        return float(tensor[0]), [compressor.stats.calls for compressor in mine]

    assert LocalWorld(2).run(both) == [(4 * 127.0, [1, 2])] * 2
