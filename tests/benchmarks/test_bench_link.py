"""`python -m benchmarks link`: real ranks over shaped links, in network namespaces that come and go cleanly.

And a link that is cut is an error.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import thinwire
from benchmarks import namespaces
from benchmarks.__main__ import main
from benchmarks.harness import Line, read
from benchmarks.link import Options
from benchmarks.link_steps import LinkRank
from benchmarks.methods import TOPK
from benchmarks.namespaces import Lab
from support.loaded import start_command
from support.namespaces import FOLDER, ours, wait_until
from support.processes import living, start_module
from support.slow import slow
from thinwire.testing.pool import Workers
from thinwire.tools.links.relay import Relay

OURS, QUANTIZED = f"thinwire.AdamW {TOPK}", "attach quantize:bits=8"
PROGRAM = "benchmarks.__main__"
WIDTH = 72
"""Of 400,000 parameters, rounded to a multiple of 8, for both models."""
WEIGHTS, SMALL = 6 * 12 * WIDTH * WIDTH, 6 * 13 * WIDTH
"""Elements of six blocks of a GPT: matrices, and what is so small that thinwire sends it in 8 bits."""


def measured(rows: Path, *arguments: str) -> tuple[str, dict[str, Line]]:
    """What the command printed, and its rows by method; no namespace of it is left."""
    out, err = rows.with_suffix(".out"), rows.with_suffix(".err")
    given = ["link", "--parameters", "4e5", "--batch", "4", "--out", str(rows), *arguments]
    with start_command(*given, out=out, err=err, program=PROGRAM) as process:
        assert process.wait(200) == 0, err.read_text()
    assert not ours(process.pid)
    return out.read_text(), {row["method"]: row for row in read(rows)}


@pytest.mark.usefixtures("untouched")
def test_bytes_on_the_interface_are_those_that_each_method_sends(tmp_path: Path) -> None:
    methods = ["no communication", "dense", "fp16 hook", "bf16", QUANTIZED, OURS]
    printed, found = measured(tmp_path / "rows.jsonl", "--rates", "100mbit", "--steps", "4", "--methods", *methods)
    assert list(found) == methods
    sent = {method: row["bytes_per_step"] for method, row in found.items()}
    assert sent["no communication"] < 1000
    expected = {method: each * (WEIGHTS + SMALL) for method, each in (("dense", 4), ("fp16 hook", 2), ("bf16", 2))}
    small = thinwire.Quantize(bits=8).nbytes(SMALL)
    for method in (QUANTIZED, OURS):
        expected[method] = thinwire.compressor(method.split()[1]).nbytes(WEIGHTS) + small
    for method, payload in expected.items():
        assert payload < sent[method] < 1.1 * payload + 2000, method  # TCP's and Ethernet's headers take 6 %
    assert found["dense"]["ms"] > 0.9e3 * 8 * 4 * WEIGHTS / 100e6  # not faster than its link
    assert found["dense"]["steps"] == 4
    for method in methods:
        assert re.search(rf"^\| \**{re.escape(method)}\** \| [\d,.]+ ", printed, re.MULTILINE), printed


def test_through_a_relay_auto_chooses_and_rows_of_local_steps_are_means_of_whole_rounds(tmp_path: Path) -> None:
    """auto is there once it has chosen, and then sends either all of it or a byte for each element."""
    methods = "no communication", "dense", "attach auto", "local steps 4", "local steps 4;delay=2"
    arguments = ["--relay", "--rates", "1gbit,20ms", "--model", "cnn", "--steps", "4"]
    printed, found = measured(tmp_path / "rows.jsonl", *arguments, "--methods", *methods)
    assert "the relay delivers each byte half of it after it was sent" in printed
    assert list(found) == list(methods)
    assert [row["statistic"] for row in found.values()] == ["median"] * 3 + ["mean"] * 2
    assert all(row["steps"] == 4 for row in found.values())
    weights, small = 8 * 9 * WIDTH * WIDTH, 8 * WIDTH
    dense, auto, plain = (found[method]["bytes_per_step"] for method in methods[1:4])
    ring = 4 * (weights + small)
    assert ring < dense < 1.01 * ring  # no headers of TCP, and little of gloo's
    assert ring / 5 < auto < 1.01 * dense
    payload = thinwire.compressor(TOPK).nbytes(weights, torch.float32)
    assert payload / 4 < plain < 1.5 * payload / 4 + 2000
    assert found["local steps 4"]["ms"] >= 20 / 2 / 4, "each round waits for a message"
    conditions = found["dense"]["conditions"]
    assert conditions["links"] == "relay"
    assert "--model cnn" in conditions["command"]


@pytest.mark.usefixtures("untouched")
def test_the_command_can_be_stopped_at_any_time() -> None:
    """No namespace and no rank stays; a ^C on a terminal goes to all processes of the command at once."""
    given = ["--rates", "100mbit", "--parameters", "1e5", "--steps", "1000000", "--methods", "no communication"]

    def alive() -> list[int]:
        return [pid for pid, session in living() if session == process.pid]

    with start_command("link", *given, out=os.devnull, err=os.devnull, program=PROGRAM) as process:
        switch = FOLDER / f"thinwire-{process.pid}-switch"
        wait_until(lambda: switch.exists() and len(alive()) >= 4, 60)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
    wait_until(lambda: not ours(process.pid) and not alive())


def test_without_root_or_tools_a_relay_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    for tools, message in (
        ("/sbin/ip", "network namespaces need root, and this is not root; --relay needs no rights and no tools"),
        (None, "ip and tc not found: install iproute2; --relay"),
    ):
        monkeypatch.setattr(namespaces.shutil, "which", lambda name, tools=tools: tools)
        assert main(["link"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    with namespaces.network(2, 1e9, 0.02, relay=False) as made:
        assert isinstance(made, Relay), "only a relay has a round-trip time"
    assert [list(Options(relay=relay).speeds)[-1] for relay in (False, True)] == ["10gbit", "1gbit"]  # it is too slow


# Links and namespaces by themselves.

WORLD, TIMEOUT, GRACE = 3, 4.0, 4.0


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
        if method == QUANTIZED:
            workers.ask("load_kernels", QUANTIZED.split()[1])
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
@pytest.mark.parametrize("method", [slow("dense"), QUANTIZED])
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
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
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
