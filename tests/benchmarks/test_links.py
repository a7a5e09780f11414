"""Network namespaces: rate, bytes, faults in a step (of the relay, too), and that they come and go cleanly."""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import thinwire
from benchmarks.link_steps import LinkRank
from benchmarks.namespaces import Lab, network
from support.namespaces import FOLDER, ours, wait_until
from support.processes import start_module
from support.slow import slow
from support.transfer import Transfer
from thinwire.testing.pool import Workers

WORLD, TIMEOUT, GRACE = 3, 4.0, 4.0
OURS = "attach quantize:bits=8"


class TestedRank(LinkRank):
    __test__ = False

    def load_kernels(self, spec: str) -> None:
        """Before a time-out counts: they may have to be compiled."""
        thinwire.compressor(spec).compress(torch.randn(100_000), torch.zeros(100_000)).decompress()

    def attempt(self) -> tuple[str, float]:
        """What one step raises, and after how many seconds; nothing if it ends well."""
        started = time.monotonic()
        try:
            self.steps(1)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - started
        return "", time.monotonic() - started


def disturb(method: str, fault: str, rank: int, *, relay: bool) -> list[tuple[str, float]]:
    """Cut or drop the link of a rank in the middle of a step: what each rank raises, and after how long."""
    with (
        network(WORLD, None, relay=relay) as net,
        Workers(WORLD, limit=TIMEOUT, links=net.links) as workers,
        ThreadPoolExecutor(1) as pool,
    ):
        workers.form(WORLD, TestedRank)
        if method == OURS:
            workers.ask("load_kernels", OURS.split()[1])
        workers.ask("start", method, "gpt", 3e5, 2)
        workers.ask("steps", 2)
        net.shape(5e6 if method == "dense" else 2e6)  # two seconds or so for the next step
        before, deadline = sum(net.sent_bytes()), time.monotonic() + TIMEOUT
        answers = pool.submit(workers.ask, "attempt", limit=TIMEOUT + 2 * GRACE)
        while sum(net.sent_bytes()) < before + 60_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        getattr(net, fault)(rank)
        return answers.result(TIMEOUT + 3 * GRACE)


@pytest.mark.parametrize(
    ("kind", "fault", "method", "rank"),
    [
        slow("relay", "drop", "dense", 1), ("relay", "drop", OURS, 0), slow("namespaces", "cut", "dense", 1),
        ("namespaces", "cut", OURS, 1),
    ],
)  # fmt: skip
def test_a_connection_lost_in_a_step_is_an_error_on_all_ranks(
    kind: str, fault: str, method: str, rank: int, request: pytest.FixtureRequest
) -> None:
    """Reset, or a link cut: within the time-out."""
    if kind == "namespaces":
        request.getfixturevalue("untouched")
    for raised, seconds in disturb(method, fault, rank, relay=kind == "relay"):
        assert raised
        assert seconds < TIMEOUT + GRACE


@pytest.mark.usefixtures("lab_can_be_built", "untouched")
def test_bytes_are_counted_and_no_faster_than_the_rate() -> None:
    nbytes = 1_000_000
    with Lab(2, None) as lab:
        lab.shape(40e6)
        done = Transfer(lab, nbytes)
    assert done.received == nbytes
    assert nbytes <= done.counted < 1.1 * nbytes  # TCP's and Ethernet's headers take 6 %
    assert done.seconds >= 0.9 * 8 * nbytes / 40e6  # a busy machine can only make it longer


@pytest.mark.usefixtures("lab_can_be_built")
def test_a_lab_comes_and_goes(untouched: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab(3, 1e9) as made:
        assert ours() == set(made.links.namespaces)
        untouched()
        assert Transfer(made, 100_000).received == 100_000
    assert not ours()
    with pytest.raises(KeyError), Lab(2, 1e9):
        raise KeyError
    assert not ours(), "after an error inside"
    monkeypatch.setattr(Lab, "shape", lambda self, rate: 1 / 0)
    with pytest.raises(ZeroDivisionError), Lab(2, 1e9):
        pass
    assert not ours(), "after an error while it is built"


@pytest.mark.usefixtures("lab_can_be_built", "untouched")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_namespace(number: signal.Signals) -> None:
    process = start_module("held_lab")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(ours(process.pid)) == 3
    process.send_signal(number)
    process.communicate(timeout=30)
    wait_until(lambda: not ours(process.pid))


@pytest.mark.usefixtures("lab_can_be_built", "untouched")
def test_what_a_guard_could_not_remove_is_swept_up_and_nothing_else() -> None:
    """As after a loss of power of the guard too: names of a process that is gone."""
    gone = subprocess.Popen(["true"])
    gone.wait(30)
    left, foreign, living = f"thinwire-{gone.pid}-0", f"thinwire-test-{os.getpid()}", f"thinwire-{os.getppid()}-0"
    for name in (left, foreign, living):
        subprocess.run(["ip", "netns", "add", name], check=True, timeout=30)
    try:
        with Lab(1, None):
            assert {name: (FOLDER / name).exists() for name in (left, foreign, living)} == {
                left: False, foreign: True, living: True,
            }  # fmt: skip
    finally:
        for name in (foreign, living):
            subprocess.run(["ip", "netns", "del", name], check=True, timeout=30)


@pytest.mark.usefixtures("lab_can_be_built", "untouched")
def test_a_cut_link_carries_nothing() -> None:
    with Lab(2, 100e6) as made:
        made.cut(1)
        result: list[str] = []

        def connect() -> None:
            made.links.enter(1)
            try:
                socket.create_connection((made.links.address(0), 9), timeout=1).close()
            except OSError as error:
                result.append(type(error).__name__)

        thread = threading.Thread(target=connect)
        thread.start()
        thread.join(30)
    assert result == ["TimeoutError"] or result == ["OSError"], result


def test_a_lab_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="ip and tc not found: install iproute2"):
        Lab(2, 1e9)
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="need root"):
        Lab(2, 1e9)
