"""Processes that answer questions, and what is told when one does not."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from thinwire.tools.workers import WorkerError, Workers


class Actor:
    """Does what it is told to, on one rank."""

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

    def both(self, first: str, second: str) -> int:
        return self.act(second if self.rank else first, self.rank)


def test_ranks_answer_and_end() -> None:
    before = set(multiprocessing.active_children())  # other tests keep some
    with Workers(3) as group:
        for size in (3, 2):
            group.form(size, Actor)
            assert group.ask("act", "", 0) == [rank * size for rank in range(size)]
        assert len(set(multiprocessing.active_children()) - before) == 3
    assert set(multiprocessing.active_children()) == before


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
        group.form(2, Actor)
        with pytest.raises(WorkerError) as failure:
            group.ask("act", what, 1, limit=2.0 if what == "sleep" else 60.0)
    assert str(failure.value) == message
    assert failure.value.rank == 1
    assert set(multiprocessing.active_children()) == before


def test_a_bug_keeps_its_traceback_and_an_echo_does_not_hide_its_cause() -> None:
    with Workers(2) as group:
        group.make(2, Actor)
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
        group.make(2, Actor)
        group.signal(signal.SIGTERM)
        with pytest.raises(WorkerError, match="was killed by SIGTERM"):
            group.ask("act", "", 0)


BUSY_START = """
import os, signal, sys, threading, time
from multiprocessing.process import BaseProcess
from thinwire.tools.workers import Workers

class Stop(BaseException):
    pass

def stop(number, frame):
    raise Stop

taken = threading.Event()
threading.Thread(target=taken.wait, daemon=True).start()  # which has no signal blocked, and takes it
signal.signal(signal.SIGTERM, stop)
started, start = [], BaseProcess.start

def start_while_a_signal_comes(process):
    os.kill(os.getpid(), signal.SIGTERM)
    start(process)
    started.append(process)

BaseProcess.start = start_while_a_signal_comes
try:
    with Workers(2):
        pass
except Stop:
    print("stopped after", len(started))
"""


def test_a_signal_leaves_no_process_half_started() -> None:
    """A thread of a library may take it, though the main thread has it blocked."""
    done = subprocess.run([sys.executable, "-c", BUSY_START], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("stopped after 2\n", "")
