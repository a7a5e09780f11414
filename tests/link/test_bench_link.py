"""`thinwire bench link`: real ranks over shaped links, through the installed command."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from namespaces import FOLDER, ours, wait_until

import thinwire
from thinwire.tools import cli, record
from thinwire.tools.bench.link import Options, measured
from thinwire.tools.bench.link.command import command
from thinwire.tools.bench.link.settings import Model, Settings
from thinwire.tools.bench.progress import Progress
from thinwire.tools.workers import WorkerError

COMMAND = str(Path(sys.executable).with_name("thinwire"))
OURS, QUANTIZED = "thinwire.AdamW topk:ratio=1/64,bits=2", "attach quantize:bits=8"
WIDTH = 72
"""Of 400,000 parameters, as settings.py rounds it, for both models."""
WEIGHTS, SMALL = 6 * 12 * WIDTH * WIDTH, 6 * 13 * WIDTH
"""Entries of six blocks of a GPT: matrices, and what is so small that thinwire sends it in 8 bits."""


def measure(rows: Path, *arguments: str) -> tuple[str, dict[str, record.Line]]:
    """What the command printed, and its rows by way; no namespace of it is left."""
    given = [COMMAND, "bench", "link", "--parameters", "4e5", "--batch", "4", "--out", str(rows), *arguments]
    process = subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    printed, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert not ours(process.pid)
    return printed, {row["way"]: row for row in record.read(rows)}


@pytest.mark.usefixtures("untouched")
def test_bytes_on_the_interface_are_those_that_each_way_sends(tmp_path: Path) -> None:
    ways = ["no communication", "dense", "fp16 hook", "bf16", QUANTIZED, OURS]
    printed, found = measure(tmp_path / "rows.jsonl", "--rates", "100mbit", "--steps", "4", "--ways", *ways)
    assert list(found) == ways
    sent = {way: row["bytes_per_step"] for way, row in found.items()}
    assert sent["no communication"] < 1000
    expected = {way: each * (WEIGHTS + SMALL) for way, each in (("dense", 4), ("fp16 hook", 2), ("bf16", 2))}
    for way in (QUANTIZED, OURS):
        expected[way] = thinwire.compressor(way.split()[1]).nbytes(WEIGHTS) + thinwire.Quantize(bits=8).nbytes(SMALL)
    for way, payload in expected.items():
        assert payload < sent[way] < 1.1 * payload + 2000, way  # TCP's and Ethernet's headers take 6 %
    assert found["dense"]["ms"] > 0.9e3 * 8 * 4 * WEIGHTS / 100e6  # not faster than its link
    assert found["dense"]["steps"] == 4
    for way in ways:
        assert re.search(rf"{re.escape(way)} +[\d,.]+ +[\d,.]+ +[\d.]+", printed), printed


def test_through_a_relay_between_three_ranks_with_a_timeline(tmp_path: Path) -> None:
    page = tmp_path / "timeline.html"
    ways = ["dense", "attach topk:ratio=1/16,bits=4", "thinwire.SGD quantize:bits=4"]
    arguments = ["--relay", "--worlds", "3", "--model", "cnn", "--rates", "1gbit", "--steps", "2"]
    printed, found = measure(tmp_path / "rows.jsonl", *arguments, "--timeline", str(page), "--ways", *ways)
    assert list(found) == ways
    ring = 2 * 2 / 3 * 4 * 8 * (9 * WIDTH * WIDTH + WIDTH)
    assert ring < found["dense"]["bytes_per_step"] < ring + 0.01 * ring  # no headers of TCP, and little of gloo's
    conditions = found["dense"]["conditions"]
    assert conditions["links"] == "relay"
    assert f"--timeline {page}" in conditions["command"]
    text = page.read_text()
    assert [way for way in ways if f"<h2>{way}, 1gbit, 3 ranks</h2>" in text] == ways[1:]
    assert "bucket 1, " in text
    assert str(page) in printed


def test_rounds_and_what_auto_chooses(tmp_path: Path) -> None:
    """In two rounds; auto is there once it has chosen, and then sends either all of it or a byte for each entry."""
    ways = ["dense", "attach auto"]
    _, found = measure(tmp_path / "rows.jsonl", "--rates", "1gbit", "--steps", "7", "--ways", *ways)
    assert {way: found[way]["steps"] for way in ways} == dict.fromkeys(ways, 7)
    dense, auto = (found[way]["bytes_per_step"] for way in ways)
    assert 4 * (WEIGHTS + SMALL) < dense < 1.1 * 4 * (WEIGHTS + SMALL)
    eighth = thinwire.compressor("quantize:bits=8").nbytes(WEIGHTS, torch.float32)
    assert eighth < auto < 1.01 * dense


def test_a_failure_loses_no_row_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """dense was done after one round, but told after the way before it, which fails in its second."""

    def take(way: str, taken: measured.Taken, *_: object) -> None:
        if taken.steps:
            raise WorkerError("rank 1 of 2 was killed")
        taken.samples, taken.steps, taken.left = [1.0], 1, int(way != "dense")

    monkeypatch.setattr(measured, "_take_steps", take)
    given = Settings({"1gbit": 1e9}, (2,), ("no communication", "dense"), (), Model("gpt", 4e5, 4), 2, False)
    nobody: Any = None
    rows = measured._measure_ways("1gbit", 2, given, nobody, nobody, Progress(2), False)
    assert [next(rows).way, next(rows).way] == ["no communication", "dense"]
    with pytest.raises(WorkerError):
        next(rows)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_command_can_be_stopped_at_any_time(number: signal.Signals) -> None:
    """No namespace and no rank stays; a ^C on a terminal goes to all processes of the command at once."""
    arguments = ["--rates", "100mbit", "--parameters", "1e5", "--steps", "1000000", "--ways", "no communication"]
    given = [COMMAND, "bench", "link", *arguments]
    process = subprocess.Popen(given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    switch = FOLDER / f"thinwire-{process.pid}-switch"
    wait_until(lambda: switch.exists() and len(_processes(process.pid)) >= 4, 60)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.kill()
    assert process.wait(30) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    wait_until(lambda: not ours(process.pid) and not _processes(process.pid))


def _processes(session: int) -> list[int]:
    """Those of a session that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended
            continue
        if int(its) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


NONSENSE = [
    (["--rates", "fast"], "rate 'fast', expected one from 100kbit to 1000gbit"),
    (["--rates", "0gbit"], "rate '0gbit'"),
    (["--rates", "1gbit", "1gbit"], "--rates 1gbit 1gbit, expected one or more, each once"),
    (["--relay", "--rates", "10gbit"], "--relay --rates 10gbit, expected 2gbit or less"),
    (["--worlds", "1"], "--worlds 1, expected 2 to 64"),
    (["--worlds", "two"], "--worlds"),
    (["--ways", "help"], "--ways 'help', expected all, or some of: no communication, dense"),
    (["--ways", "attach"], "--ways 'attach', expected all, or some of"),
    (["--ways", "powersgd package"], "pip install git+https://github.com/epfml/powersgd.git"),
    (["--relay", "--ways", "attach gzip"], "gzip"),
    (["--relay", "--ways", "thinwire.AdamW topk:ratio=2"], "ratio"),
    (["--model", "rnn"], "--model"),
    (["--steps", "0"], "--steps 0, expected 1 or more"),
    (["--batch", "-1"], "--batch -1, expected 1 or more"),
    (["--parameters", "-3"], "--parameters -3, expected 1e4 to 1e9"),
    (["--parameters", "nan"], "--parameters nan, expected 1e4 to 1e9"),
    (["--out", "/nowhere/rows.jsonl"], "--out /nowhere/rows.jsonl, expected a file in a folder that is there"),
    (["--timeline", "/"], "--timeline /, expected a file in a folder that is there"),
    (["--relay", "--ways", "dense", "--timeline", "t.html"], "--timeline t.html, expected one of thinwire's --ways"),
]


@pytest.mark.parametrize(("arguments", "message"), NONSENSE)
def test_nonsense_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "link", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_command_of_some_options_makes_them_again() -> None:
    options = Options(rates=("1gbit",), ways=("fp16 hook", OURS), parameters=1.5e6, relay=True, out=Path("a b.jsonl"))
    text = command(options)
    assert text.endswith("--parameters 1.5e6 --relay --out 'a b.jsonl'")
    assert command(Options()) == "thinwire bench link"
