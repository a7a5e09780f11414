"""Network namespaces come and go cleanly, and a link that is cut is an error."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import thinwire
from benchmarks.link_steps import LinkRank
from benchmarks.namespaces import Lab
from support.namespaces import FOLDER, ours, wait_until
from support.processes import start_module
from support.slow import slow
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


def cut(method: str, rank: int) -> list[tuple[str, float]]:
    """Cut the link of a rank in the middle of a step: what each rank raises, and after how long."""
    with (
        Lab(WORLD, None) as net,
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
        net.cut(rank)
        return answers.result(TIMEOUT + 3 * GRACE)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("method", [slow("dense"), OURS])
def test_a_link_cut_in_a_step_is_an_error_on_all_ranks(method: str) -> None:
    """Within the time-out."""
    for raised, seconds in cut(method, rank=1):
        assert raised
        assert seconds < TIMEOUT + GRACE


@pytest.mark.usefixtures("lab_can_be_built")
def test_a_lab_comes_and_goes(untouched: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab(3, 1e9) as made:
        assert ours() == set(made.links.namespaces)
        untouched()
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
