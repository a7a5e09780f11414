"""`thinwire bench link`: real ranks over shaped links, through the installed command."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from support.loaded import start_command
from support.namespaces import FOLDER, ours, wait_until
from support.processes import living
from thinwire.testing.pool import RankError
from thinwire.tools import cli, record
from thinwire.tools.bench.harness import Progress, command_line
from thinwire.tools.bench.link import Options, rounds

OURS, QUANTIZED = "thinwire.AdamW topk:ratio=1/64,bits=2", "attach quantize:bits=8"
WIDTH = 72
"""Of 400,000 parameters, as settings.py rounds it, for both models."""
WEIGHTS, SMALL = 6 * 12 * WIDTH * WIDTH, 6 * 13 * WIDTH
"""Elements of six blocks of a GPT: matrices, and what is so small that thinwire sends it in 8 bits."""


def measure(rows: Path, *arguments: str) -> tuple[str, dict[str, record.Line]]:
    """What the command printed, and its rows by method; no namespace of it is left."""
    out, err = rows.with_suffix(".out"), rows.with_suffix(".err")
    given = ["bench", "link", "--parameters", "4e5", "--batch", "4", "--out", str(rows), *arguments]
    with start_command(*given, out=out, err=err) as process:
        assert process.wait(200) == 0, err.read_text()
    assert not ours(process.pid)
    return out.read_text(), {row["method"]: row for row in record.read(rows)}


@pytest.mark.usefixtures("untouched")
def test_bytes_on_the_interface_are_those_that_each_method_sends(tmp_path: Path) -> None:
    methods = ["no communication", "dense", "fp16 hook", "bf16", QUANTIZED, OURS]
    printed, found = measure(tmp_path / "rows.jsonl", "--rates", "100mbit", "--steps", "4", "--methods", *methods)
    assert list(found) == methods
    sent = {method: row["bytes_per_step"] for method, row in found.items()}
    assert sent["no communication"] < 1000
    expected = {method: each * (WEIGHTS + SMALL) for method, each in (("dense", 4), ("fp16 hook", 2), ("bf16", 2))}
    for method in (QUANTIZED, OURS):
        expected[method] = thinwire.compressor(method.split()[1]).nbytes(WEIGHTS) + thinwire.Quantize(bits=8).nbytes(
            SMALL
        )
    for method, payload in expected.items():
        assert payload < sent[method] < 1.1 * payload + 2000, method  # TCP's and Ethernet's headers take 6 %
    assert found["dense"]["ms"] > 0.9e3 * 8 * 4 * WEIGHTS / 100e6  # not faster than its link
    assert found["dense"]["steps"] == 4
    for method in methods:
        assert re.search(rf"{re.escape(method)} +[\d,.]+ +[\d,.]+ +[\d.]+", printed), printed


def test_through_a_relay_between_three_ranks_with_a_timeline(tmp_path: Path) -> None:
    trace = tmp_path / "timeline.json"
    methods = ["dense", "attach topk:ratio=1/16,bits=4", "thinwire.SGD quantize:bits=4"]
    arguments = ["--relay", "--worlds", "3", "--model", "cnn", "--rates", "1gbit", "--steps", "2"]
    printed, found = measure(tmp_path / "rows.jsonl", *arguments, "--timeline", str(trace), "--methods", *methods)
    assert list(found) == methods
    ring = 2 * 2 / 3 * 4 * 8 * (9 * WIDTH * WIDTH + WIDTH)
    assert ring < found["dense"]["bytes_per_step"] < ring + 0.01 * ring  # no headers of TCP, and little of gloo's
    conditions = found["dense"]["conditions"]
    assert conditions["links"] == "relay"
    assert f"--timeline {trace}" in conditions["command"]
    events = json.loads(trace.read_text())["traceEvents"]
    names = {
        kind: [one["args"]["name"] for one in events if one["name"] == kind] for kind in ("process_name", "thread_name")
    }
    assert [name.partition(", 1gbit, 3 ranks: ")[0] for name in names["process_name"]] == methods[1:]
    assert any(name.startswith("bucket 1, ") for name in names["thread_name"])
    assert str(trace) in printed


def test_rounds_and_what_auto_chooses(tmp_path: Path) -> None:
    """In two rounds; auto is there once it has chosen, and then sends either all of it or a byte for each element."""
    methods = ["dense", "attach auto"]
    _, found = measure(tmp_path / "rows.jsonl", "--rates", "1gbit", "--steps", "7", "--methods", *methods)
    assert {method: found[method]["steps"] for method in methods} == dict.fromkeys(methods, 7)
    dense, auto = (found[method]["bytes_per_step"] for method in methods)
    assert 4 * (WEIGHTS + SMALL) < dense < 1.1 * 4 * (WEIGHTS + SMALL)
    eighth = thinwire.compressor("quantize:bits=8").nbytes(WEIGHTS, torch.float32)
    assert eighth < auto < 1.01 * dense


def test_a_failure_loses_no_row_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """dense was done after one round, but yielded after the method before it, which fails in its second."""

    def take(taken: rounds.Taken, *_: object) -> None:
        if taken.steps:
            raise RankError("rank 1 of 2 was killed")
        taken.samples, taken.steps, taken.left = [1.0], 1, int(taken.method.text != "dense")

    monkeypatch.setattr(rounds, "take_steps", take)
    given = Options(methods=("no communication", "dense"), steps=2)
    nobody: Any = None
    rows = rounds.measure_methods("1gbit", 2, given, nobody, nobody, Progress(2))
    assert [next(rows)["method"], next(rows)["method"]] == ["no communication", "dense"]
    with pytest.raises(RankError):
        next(rows)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_command_can_be_stopped_at_any_time(number: signal.Signals) -> None:
    """No namespace and no rank stays; a ^C on a terminal goes to all processes of the command at once."""
    arguments = ["--rates", "100mbit", "--parameters", "1e5", "--steps", "1000000", "--methods", "no communication"]
    with start_command("bench", "link", *arguments, out=os.devnull, err=os.devnull) as process:
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


NONSENSE = [
    (["--rates", "fast"], "rate 'fast', expected bits per second from 100kbit to 1000gbit"),
    (["--rates", "0gbit"], "rate '0gbit'"),
    (["--rates", "1gbit,1min"], "link '1gbit,1min', expected a rate, or a rate and a round-trip time above 0"),
    (["--relay", "--rates", "10gbit,1ms"], "--relay --rates 10gbit,1ms, expected 2gbit or less"),
    (["--rates", "1gbit", "1gbit"], "--rates 1gbit 1gbit, expected one or more, each once"),
    (["--relay", "--rates", "10gbit"], "--relay --rates 10gbit, expected 2gbit or less"),
    (["--worlds", "1"], "--worlds 1, expected 2 to 64"),
    (["--worlds", "two"], "--worlds"),
    (["--methods", "help"], "method 'help' is unknown, expected one of: no communication, dense"),
    (["--methods", "attach"], "method 'attach' is unknown, expected one of"),
    (["--methods", "powersgd package"], "pip install git+https://github.com/epfml/powersgd.git"),
    (["--relay", "--methods", "attach gzip"], "gzip"),
    (["--relay", "--methods", "thinwire.AdamW topk:ratio=2"], "ratio"),
    (["--model", "rnn"], "--model"),
    (["--steps", "0"], "--steps 0, expected 1 or more"),
    (["--batch", "-1"], "--batch -1, expected 1 or more"),
    (["--parameters", "-3"], "--parameters -3, expected 1e4 to 1e9"),
    (["--parameters", "nan"], "--parameters nan, expected 1e4 to 1e9"),
    (["--out", "/nowhere/rows.jsonl"], "--out /nowhere/rows.jsonl, expected a file in an existing folder"),
    (["--timeline", "/"], "--timeline /, expected a file in an existing folder"),
    (
        ["--relay", "--methods", "dense", "--timeline", "t.json"],
        "--timeline t.json, expected one of thinwire's --methods",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), NONSENSE)
def test_nonsense_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "link", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_command_of_some_options_makes_them_again() -> None:
    options = Options(
        rates=("1gbit",), methods=("fp16 hook", OURS), parameters=1.5e6, relay=True, out=Path("a b.jsonl")
    )
    text = command_line("bench link", options)
    assert text.endswith("--parameters 1.5e6 --relay --out 'a b.jsonl'")
    assert command_line("bench link", Options()) == "thinwire bench link"
