"""`python -m benchmarks link`: real ranks over shaped links."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from benchmarks import link_steps, namespaces
from benchmarks.__main__ import main
from benchmarks.harness import Line, Progress, read
from benchmarks.link import Options
from benchmarks.methods import TOPK
from support.loaded import start_command
from support.namespaces import FOLDER, ours, wait_until
from support.processes import living
from thinwire.testing.pool import RankError
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


def test_through_a_relay_between_three_ranks(tmp_path: Path) -> None:
    """In two rounds; auto is there once it has chosen, and then sends either all of it or a byte for each element."""
    methods = ["dense", "attach auto", "thinwire.SGD quantize:bits=4"]
    arguments = ["--relay", "--worlds", "3", "--model", "cnn", "--rates", "1gbit", "--steps", "7"]
    _, found = measured(tmp_path / "rows.jsonl", *arguments, "--methods", *methods)
    assert list(found) == methods
    ring = 2 * 2 / 3 * 4 * 8 * (9 * WIDTH * WIDTH + WIDTH)
    dense, auto, ours = (found[method]["bytes_per_step"] for method in methods)
    assert ring < dense < ring + 0.01 * ring  # no headers of TCP, and little of gloo's
    assert ours < ring / 5 < auto < 1.01 * dense
    assert all(row["steps"] == 7 for row in found.values())
    conditions = found["dense"]["conditions"]
    assert conditions["links"] == "relay"
    assert "--worlds 3 --methods dense" in conditions["command"]


def test_rows_of_local_steps_are_means_of_whole_rounds(tmp_path: Path) -> None:
    methods = "no communication", "local steps 4", "local steps 4;delay=2"
    arguments = ["--rates", "100mbit,20ms", "--relay", "--steps", "4", "--methods", *methods]
    printed, found = measured(tmp_path / "rows.jsonl", *arguments)
    assert "the relay delivers each byte half of it after it was sent" in printed
    nothing, plain, delayed = found.values()
    assert [row["statistic"] for row in (nothing, plain, delayed)] == ["median", "mean", "mean"]
    assert [row["steps"] for row in (plain, delayed)] == [4, 4]
    assert plain["ms"] == plain["ms_mean"] >= 20 / 2 / 4, "each round waits for a message"
    payload = thinwire.compressor(TOPK).nbytes(WEIGHTS, torch.float32)
    assert payload / 4 < plain["bytes_per_step"] < 1.5 * payload / 4 + 2000


def test_a_failure_loses_no_row_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """dense was done after one round, but yielded after the method before it, which fails in its second."""

    def take(taken: link_steps.Taken, *_: object) -> None:
        if taken.steps:
            raise RankError("rank 1 of 2 was killed")
        taken.samples, taken.steps, taken.left = [1.0], 1, int(taken.method.text != "dense")

    monkeypatch.setattr(link_steps, "take_steps", take)
    given = Options(methods=("no communication", "dense"), steps=2)
    nobody: Any = None
    rows = link_steps.measure_methods("1gbit", 2, given, nobody, nobody, Progress(2))
    assert [next(rows)["method"], next(rows)["method"]] == ["no communication", "dense"]
    with pytest.raises(RankError):
        next(rows)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_command_can_be_stopped_at_any_time(number: signal.Signals) -> None:
    """No namespace and no rank stays; a ^C on a terminal goes to all processes of the command at once."""
    given = ["--rates", "100mbit", "--parameters", "1e5", "--steps", "1000000", "--methods", "no communication"]
    with start_command("link", *given, out=os.devnull, err=os.devnull, program=PROGRAM) as process:
        switch = FOLDER / f"thinwire-{process.pid}-switch"
        wait_until(lambda: switch.exists() and len(_processes(process.pid)) >= 4, 60)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.kill()
        assert process.wait(30) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    wait_until(lambda: not ours(process.pid) and not _processes(process.pid))


def _processes(leader: int) -> list[int]:
    """Those of a session that live."""
    return [pid for pid, session in living() if session == leader]


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
    assert "10gbit" in Options.defaults([]).rates
    assert "10gbit" not in Options.defaults(["--relay"]).rates, "for which a relay is too slow"
