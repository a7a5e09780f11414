"""Processes that answer questions, and the error when one does not."""

import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import thinwire
from support.ports import listening
from support.processes import run_module
from thinwire.collectives.transport.records import Record, read_notice
from thinwire.collectives.transport.watch import PATIENCE_SECONDS
from thinwire.tools.workers import WorkerError, Workers

KEYS = ("error", "verdict", "connect", "read", "arrived", "here/0", "here/1")


class Rank:
    """Does what the argument says, on one rank."""

    def __init__(self, rank: int, size: int, what: str = "") -> None:
        self.rank, self.size = rank, size
        self.act(what, 1)

    def act(self, what: str, on: int) -> int:
        if self.rank == on:
            if what == "raise":
                raise ValueError("no more tensors")
            if what == "die":
                os._exit(3)
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "bug":
                raise ZeroDivisionError
            if what == "lose":  # what DDP makes of the loss of a peer
                raise RuntimeError("Unable to cast all_reduce_compressed #3 on rank 0: rank 1 is lost to Tensor")
            if what == "sleep":
                time.sleep(60)
        return self.rank * self.size

    def reduce(self, numel: int) -> float:
        """All-reduce a tensor, with ranks that come one after the other, so that they look at the board."""
        tensor = torch.ones(numel)
        time.sleep(2.5 * PATIENCE_SECONDS * self.rank)
        thinwire.all_reduce_compressed(tensor, "none", timeout=30.0)
        return float(tensor.sum())

    def both(self, first: str, second: str) -> int:
        return self.act(second if self.rank else first, self.rank)


def test_ranks_answer_and_end() -> None:
    before = set(multiprocessing.active_children())  # other tests keep some
    with Workers(3) as group:
        for size in (3, 2):
            group.form(size, Rank)
            assert group.ask("act", "", 0) == [rank * size for rank in range(size)]
        assert len(set(multiprocessing.active_children()) - before) == 3
    assert set(multiprocessing.active_children()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_store_listens_on_loopback_alone() -> None:
    with Workers(2) as group:
        group.form(2, Rank)
        port = group._store.port
        assert {place.address for place in listening() if place.port == port} == {"0100007F"}


def test_what_others_write_to_the_store_is_not_read() -> None:
    """Notices as ranks write them, where a group without a secret would look for them."""
    notice = json.dumps({"kind": "PeerError", "message": "words of others", "ranks": [0]})
    with Workers(2) as group:
        group.form(2, Rank)
        other = dist.TCPStore("127.0.0.1", group._store.port, is_master=False)
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
        try:
            found = [group.ask("reduce", numel) for numel in (10, 11, 11)]
        except WorkerError as error:
            found = [error.reason]
        ended.set()
        writing.result(60)
    assert written
    assert found == [[20.0] * 2, [22.0] * 2, [22.0] * 2] or "all_reduce_compressed #" in str(found), found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "words",
        "[]",
        "{}",
        "7",
        "null",
        "[1, 2]",
        '["1", {}, null]',
        "[1, [], null]",
        "[1, {}, 3]",
        '[1, {"call": []}, null]',
        "[" * 100_000,
    ],
    ids=lambda text: text[:12],
)
def test_a_record_that_no_rank_wrote_is_none(text: str) -> None:
    assert Record.read(text) is None
    assert Record.read(text.encode() + b"\xff") is None


@pytest.mark.parametrize(
    "text",
    [
        "", "words", "[]", "7", "null", '{"message": 1, "ranks": []}', '{"message": "m", "ranks": "all"}',
        '{"message": "m", "ranks": ["0"]}', '{"ranks": []}', "[" * 100_000,
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_notice_that_no_rank_wrote_is_none(text: str) -> None:
    assert read_notice(text) is None
    assert read_notice("{}") == {}
    assert read_notice('{"message": "m", "ranks": [0], "kind": "PeerError"}') is not None


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "rank 1 of 2 raised ValueError: no more tensors"),
        ("die", "rank 1 of 2 died with exit code 3"),
        ("kill", "rank 1 of 2 was killed by SIGKILL"),
        ("sleep", "rank 1 of 2 did not answer within 2 s"),
    ],
)
def test_a_failure_names_its_rank(what: str, message: str) -> None:
    before = set(multiprocessing.active_children())
    with Workers(2) as group:
        group.form(2, Rank)
        with pytest.raises(WorkerError) as failure:
            group.ask("act", what, 1, limit=2.0 if what == "sleep" else 60.0)
    assert str(failure.value) == message
    assert failure.value.rank == 1
    assert set(multiprocessing.active_children()) == before


def test_a_bug_keeps_its_traceback_and_an_echo_does_not_hide_its_cause() -> None:
    with Workers(2) as group:
        group.make(2, Rank)
        with pytest.raises(WorkerError) as failure:
            group.ask("act", "raise", 0)
        assert failure.value.trace == ""
        with pytest.raises(WorkerError) as failure:
            group.ask("both", "lose", "bug")
    assert failure.value.rank == 1
    assert failure.value.reason.startswith("raised ZeroDivisionError")
    assert "in act" in failure.value.trace


def test_a_signal_reaches_all() -> None:
    with Workers(2) as group:
        group.make(2, Rank)
        group.signal(signal.SIGTERM)
        with pytest.raises(WorkerError, match="was killed by SIGTERM"):
            group.ask("act", "", 0)


def test_a_signal_leaves_no_process_half_started() -> None:
    """A thread of a library may take it, though the main thread has it blocked."""
    assert run_module("busy_start") == "stopped after 2"
