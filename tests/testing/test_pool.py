"""Ranks as processes: a test whose ranks cannot make it fail would prove nothing, and a program must name the cause."""

import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.loaded import Copy, start_function
from support.ports import listening
from support.processes import living
from thinwire.collectives.transport.records import Record, read_notice
from thinwire.collectives.transport.watch import PATIENCE_SECONDS
from thinwire.testing import LOST, RankError, RankPool
from thinwire.testing.pool import Workers

KEYS = ("error", "verdict", "connect", "read", "arrived", "here/0", "here/1")


def add_ranks(rank: int, world_size: int, start: int) -> int:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return int(total)


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


ERRORS = {
    "raise": ValueError("the reason"),
    "bug": ZeroDivisionError("the reason"),
    # what DDP makes of the loss of a peer
    "lose": RuntimeError("Unable to cast all_reduce_compressed #3 on rank 0: rank 1 is lost to Tensor"),
}


def act(rank: int, world_size: int, what: str, on: int) -> int:
    if rank == on:
        if what in ERRORS:
            raise ERRORS[what]
        if what == "warn":
            warnings.warn("the reason", stacklevel=2)
        if what == "exit":
            os._exit(3)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(60 * (what == "hang"))
    return rank * world_size


def raise_in_a_training(rank: int, world_size: int) -> None:
    """Rank 0 raises with a model in its hands, whose connections the others wait on."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    thinwire.attach(model, "quantize:bits=8")
    for step in range(3):
        if rank == 0 and step == 2:
            raise KeyError("the reason")
        model(torch.ones(1, 64)).sum().backward()


def test_results_come_in_the_order_of_ranks_and_processes_are_used_again(ranks: RankPool) -> None:
    for store in ("parent", "rank0"):
        assert ranks.run(add_ranks, 3, 10, store=store) == [33, 33, 33]
    assert ranks.run(add_ranks, 1, 10) == [10]
    first = ranks.run(process_id, 2)
    assert len(set(first)) == 2
    assert ranks.run(process_id, 3)[:2] == first


def test_a_failure_reaches_the_test_with_its_rank_and_processes_are_replaced(ranks: RankPool) -> None:
    for what, expected in {
        "bug": ("rank 1 of 3 raised\nTraceback", "ZeroDivisionError: the reason"),
        "warn": ("rank 1 of 3 raised\nTraceback", "UserWarning: the reason"),
        "kill": ("rank 1 of 3 was killed by SIGKILL; it wrote", ""),
        "hang": ("rank 1 of 3 did not answer within 3 s; it was here", "in act"),
    }.items():
        before = ranks.run(process_id, 3)
        with pytest.raises(RankError) as caught:
            ranks.run(act, 3, what, 1, timeout=3.0 if what == "hang" else 60.0)
        assert caught.value.ranks == [1], what
        assert all(words in str(caught.value) for words in expected), (what, str(caught.value))
        assert not set(before) & set(ranks.run(process_id, 3)), what
    assert ranks.run(add_ranks, 3, 0) == [3, 3, 3]


def test_a_rank_that_raises_in_a_training_ends_the_others(ranks: RankPool) -> None:
    """Its connections are closed at once, those of thinwire among them: nobody waits for a time-out."""
    with pytest.raises(RankError, match="rank 0 of 2 raised") as caught:
        ranks.run(raise_in_a_training, 2)
    assert caught.value.ranks[0] == 0
    assert "KeyError: 'the reason'" in str(caught.value)
    assert "did not end" not in str(caught.value)


def test_a_rank_that_is_meant_to_die_leaves_a_mark(ranks: RankPool) -> None:
    assert ranks.run(act, 2, "kill", 0, lost=[0]) == [LOST, 2]
    with pytest.raises(RankError, match="rank 1 of 2 answered 2, expected it to die"):
        ranks.run(act, 2, "kill", 5, lost=[1])


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


class Rank:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def act(self, what: str, on: int) -> int:
        return act(self.rank, self.size, what, on)

    def reduce(self, numel: int) -> float:
        """All-reduce a tensor, with ranks that come one after the other, so that they look at the board."""
        tensor = torch.ones(numel)
        time.sleep(2.5 * PATIENCE_SECONDS * self.rank)
        thinwire.all_reduce_compressed(tensor, "none", timeout=30.0)
        return float(tensor.sum())

    def both(self, first: str, second: str) -> int:
        return self.act(second if self.rank else first, self.rank)


def test_workers_answer_and_end() -> None:
    before = set(multiprocessing.active_children())  # other tests keep some
    with Workers(3) as group:
        for size in (3, 2):
            group.form(size, Rank)
            assert group.ask("act", "", 0) == [rank * size for rank in range(size)]
        assert len(set(multiprocessing.active_children()) - before) == 3
    assert set(multiprocessing.active_children()) == before


def test_a_failure_of_a_worker_names_its_rank() -> None:
    before = set(multiprocessing.active_children())
    for what, message in {
        "raise": "rank 1 of 2 raised ValueError: the reason",
        "exit": "rank 1 of 2 died with exit code 3",
        "kill": "rank 1 of 2 was killed by SIGKILL",
        "hang": "rank 1 of 2 did not answer within 2 s",
    }.items():
        with Workers(2) as group:
            group.form(2, Rank)
            with pytest.raises(RankError) as failure:
                group.ask("act", what, 1, limit=2.0 if what == "hang" else 60.0)
        assert (str(failure.value), failure.value.ranks) == (message, [1])
        assert set(multiprocessing.active_children()) == before, what


def test_a_bug_keeps_its_traceback_and_an_echo_does_not_hide_its_cause() -> None:
    with Workers(2) as group:
        group.form(2, Rank)
        with pytest.raises(RankError) as failure:
            group.ask("act", "raise", 0, limit=None)
        assert failure.value.trace == ""
        with pytest.raises(RankError) as failure:
            group.ask("both", "lose", "bug")
        assert failure.value.ranks == [1, 0]
        assert failure.value.reason.startswith("raised ZeroDivisionError")
        assert "in act" in failure.value.trace
        group.signal(signal.SIGTERM)
        with pytest.raises(RankError, match="was killed by SIGTERM"):
            group.ask("act", "", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_store_listens_on_loopback_alone_and_what_others_write_to_it_is_not_read() -> None:
    """Notices as ranks write them, where a group without a secret would look for them."""
    notice = json.dumps({"kind": "PeerError", "message": "words of others", "ranks": [0]})
    with Workers(2) as group:
        group.form(2, Rank)
        port = group._store.port
        assert {place.address for place in listening() if place.port == port} == {"0100007F"}
        other = dist.TCPStore("127.0.0.1", port, is_master=False)
        for prefix, key, number in itertools.product(("0//", ""), KEYS, range(9)):
            other.set(f"{prefix}thinwire/0/gloo/1/board/{key}/{number}", notice)
        assert group.ask("reduce", 10) == [20.0, 20.0]
        assert group.ask("reduce", 11) == [22.0, 22.0]


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch does not list the keys of a store")
@pytest.mark.parametrize("places", [("/board/",), ("/here/", "/verdict/", "/error/")], ids=["all", "texts"])
def test_nonsense_in_the_store_is_ignored_or_an_error_that_names_the_call(places: tuple[str, ...]) -> None:
    """Somebody asks the store for its keys, again and again, and writes to them."""
    ended, written = threading.Event(), []

    def write() -> None:
        other = dist.TCPStore("127.0.0.1", group._store.port, is_master=False)
        while not ended.wait(0.01):
            for key in other.list_keys():
                if any(place in key for place in places):
                    other.set(key, '{"kind": "os", "message": 1, "ranks": "all"}')
                    written.append(key)

    with Workers(2) as group, ThreadPoolExecutor(1) as pool:
        group.form(2, Rank)
        writing = pool.submit(write)
        found: list[Any] = []
        try:
            found += [group.ask("reduce", numel) for numel in (10, 11, 11)]
        except RankError as error:
            found.append(error.reason)
        ended.set()
        writing.result(60)
    assert written
    assert found == [[20.0] * 2, [22.0] * 2, [22.0] * 2] or "all_reduce_compressed #" in str(found), found


def test_what_no_rank_wrote_is_no_record_and_no_notice() -> None:
    records = ("{}", "[1, 2]", '["1", {}, null]', "[1, [], null]", "[1, {}, 3]", '[1, {"call": []}, null]')
    notices = (
        '{"message": 1, "ranks": []}', '{"message": "m", "ranks": "all"}', '{"message": "m", "ranks": ["0"]}',
        '{"ranks": []}',
    )  # fmt: skip
    for text in ("", "words", "[]", "7", "null", "[" * 100_000, *records):
        assert Record.read(text) is None, text[:40]
        assert Record.read(text.encode() + b"\xff") is None, text[:40]
    for text in ("", "words", "[]", "7", "null", "[" * 100_000, *notices):
        assert read_notice(text) is None, text[:40]
    assert read_notice("{}") == {}
    assert read_notice('{"message": "m", "ranks": [0], "kind": "PeerError"}') is not None


def start_program(name: str, folder: Path) -> Copy:
    return start_function("pool_programs", name, out=folder / "out", err=folder / "err")


def test_a_signal_leaves_no_process_half_started(tmp_path: Path) -> None:
    """A thread of a library may take it, though the main thread has it blocked."""
    with start_program("start_while_signals_come", tmp_path) as program:
        assert program.wait(120) == 0, (tmp_path / "err").read_text()
    assert (tmp_path / "out").read_text() == "stopped after 2\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    """Though they wait: SIGKILL leaves their parent no time to end them, and SIGINT is for the parent alone."""

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, (tmp_path / "err").read_text()
            time.sleep(0.05)

    with start_program("hold_ranks", tmp_path) as program:
        wait_until(lambda: (tmp_path / "out").read_text().endswith("\n"))
        ids = {int(word) for word in (tmp_path / "out").read_text().split()}
        assert len(ids) == 4
        for each in ids:
            os.kill(each, signal.SIGINT)
        time.sleep(0.2)
        assert ids <= {each for each, _ in living()}
        program.kill()
        wait_until(lambda: not ids & {each for each, _ in living()})
