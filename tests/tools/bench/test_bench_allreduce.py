"""The all-reduce benchmark: real ranks, counted bytes, formulas worked out by hand; no assertion on seconds."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.commands import assert_help_loads_no_torch, assert_refused
from support.loaded import start_command
from support.slow import slow
from thinwire.collectives import cost
from thinwire.collectives.cost import Cost
from thinwire.tools import cli, loopback, record
from thinwire.tools.bench.allreduce import ranks, simulate
from thinwire.tools.bench.allreduce.ranks import FRAMING_LIMIT, Case, byte_row
from thinwire.tools.bench.harness import Row

COMMAND = str(Path(sys.executable).with_name("thinwire"))
SMALL = ["--bytes-size", "200k", "--size", "200k", "--ranks", "2", "--repeats", "2"]
TOPK, RANDOMK = "topk:ratio=1/64,bits=2", "randomk:ratio=1/64"


# The command --------------------------------------------------------------------------------------------------------


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in record.read(path) if line["kind"] == f"allreduce {kind}"]


@pytest.mark.alone
def test_the_installed_command_counts_times_and_simulates(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    result = subprocess.run(
        [COMMAND, "bench", "allreduce", *SMALL, "--worlds", "3", "2", "--out", str(path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    counted = lines_of(path, "bytes")
    assert [(line["world"], line["spec"], line["algorithm"], line["chosen"]) for line in counted] == [
        (world, *row)
        for world in (2, 3)
        for row in [
            (TOPK, "gather", "gather"),
            (TOPK, "sharded", "sharded"),
            (TOPK, "dense", "dense"),
            (TOPK, "auto", "gather"),
            (RANDOMK, "values", "values"),
            (RANDOMK, "auto", "values"),
        ]
    ]
    for line in counted:
        assert line["fault"] is None
        assert line["reported_bytes"] == pytest.approx(line["formula_bytes"])
        if line["interface_bytes"] is not None:  # the machine may never have been quiet
            assert line["interface_bytes"] > line["reported_bytes"]  # the headers at least
    by_name = {(line["world"], line["algorithm"]): line for line in counted if line["spec"] == TOPK}
    payload = 48 * 84 + 72  # 48 records of 4,096 elements, and one of the remaining 3,392
    assert by_name[2, "gather"]["formula_bytes"] == payload
    assert by_name[3, "gather"]["formula_bytes"] == 2 * payload
    assert by_name[3, "dense"]["formula_bytes"] == pytest.approx(2 * 800_000 * 2 / 3)
    assert by_name[3, "gather"]["messages"] == 2
    assert by_name[3, "sharded"]["messages"] == 4
    assert by_name[2, "auto"]["reason"].startswith("bytes sent per rank: gather 4,104, ")

    timed = {line["name"]: line for line in lines_of(path, "time")}
    parts = ["compress", "all_gather of payloads", "decompress"]
    assert list(timed) == ["barrier", *parts, "gather", "sharded", "torch all_reduce"]
    assert all(line["ms"]["samples"] == 2 and line["ranks"] == 2 for line in timed.values())
    (ratio,) = lines_of(path, "ratio")
    assert ratio["whole_ms"] == timed["gather"]["ms"]["p50"]
    assert ratio["parts_ms"] == pytest.approx(sum(timed[part]["ms"]["p50"] for part in parts))

    simulated = lines_of(path, "simulation")
    assert {line["world"] for line in simulated} == {2**power for power in range(1, 13)}
    assert all(line["conditions"]["spec"] == TOPK for line in [*counted, *simulated])
    for text in ("Bytes sent per rank, 200,000 x float32", "auto -> gather", "sum of its parts ", "4,096  sharded"):
        assert text in result.stdout
    assert "\x1b" not in result.stdout + result.stderr


@pytest.mark.alone
@pytest.mark.parametrize("spec", [RANDOMK, slow("none")])
def test_any_compressor(spec: str, tmp_path: Path) -> None:
    """One whose values are summed, and none."""
    path = tmp_path / "rows.jsonl"
    assert cli.main(["bench", "allreduce", *SMALL, "--worlds", "2", "--spec", spec, "--out", str(path)]) == 0
    assert {line["spec"] for line in lines_of(path, "bytes")} == {spec, RANDOMK}
    flat = "values" if spec == RANDOMK else "sharded"
    assert flat in {line["name"] for line in lines_of(path, "time")}
    assert flat in {line["algorithm"] for line in lines_of(path, "simulation")}


@pytest.mark.alone
def test_bytes_that_are_off_their_formula_end_in_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right = cost.gather
    monkeypatch.setattr(
        cost,
        "gather",
        lambda *args, **options: replace(right(*args, **options), sent=1.1 * right(*args, **options).sent),
    )
    path = tmp_path / "rows.jsonl"
    options = [*SMALL, "--worlds", "2", "--parts", "bytes", "--out", str(path)]
    assert cli.main(["bench", "allreduce", *options]) == 1
    output = capsys.readouterr()
    assert "FAILED, 2 ranks, topk:ratio=1/64,bits=2, gather: reported 4,104 bytes, expected 4,514" in output.err
    assert "OFF" in output.out
    assert [line["algorithm"] for line in record.read(path) if line["fault"]] == ["gather", "auto"]
    assert "Time" not in output.out
    assert "Simulation" not in output.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--spec", "zip"], "compressor 'zip' in 'zip' is unknown"),
        (["--parts", "money"], "'money'"),
        (["--parts"], "--parts without a part"),
        (["--worlds"], "--worlds without a number of ranks"),
        (["--worlds", "4", "1"], "--worlds 1, expected 2 to 64 ranks"),
        (["--ranks", "1000"], "--ranks 1000, expected 2 to 64 ranks"),
        (["--bytes-size", "many"], "--bytes-size 'many', expected a whole number"),
        (["--size", "0"], "--size '0', expected a whole number"),
        (["--repeats", "0"], "--repeats 0, expected 1 or more"),
        (["--out", "/nonexistent/rows.jsonl"], "/nonexistent/rows.jsonl"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused("bench allreduce", arguments, message, capsys)


def test_help_does_not_load_torch() -> None:
    assert_help_loads_no_torch("bench allreduce")


# Ranks --------------------------------------------------------------------------------------------------------------


def test_a_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ranks, "Reducer", FailingReducer)
    assert cli.main(["bench", "allreduce", *SMALL, "--worlds", "2", "--parts", "bytes"]) == 1
    assert (
        capsys.readouterr().err == "thinwire bench allreduce: FAILED, rank 1 of 2 raised ValueError: no more tensors\n"
    )


class FailingReducer:
    def __init__(self, rank: int, size: int) -> None:
        if rank == 1:
            raise ValueError("no more tensors")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_no_process_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    given = ["bench", "allreduce", *SMALL, "--worlds", "2", "--repeats", "1000000", "--parts", "time"]
    err = tmp_path / "err"
    err.touch()  # it is read before the copy has opened it
    with start_command(*given, out=os.devnull, err=err) as process:
        deadline = time.monotonic() + 100
        while "ready" not in err.read_text():
            assert process.poll() is None, err.read_text()
            assert time.monotonic() < deadline, err.read_text()
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= 2
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.05)


# Numbers ------------------------------------------------------------------------------------------------------------


def counted(reported: float, interface: float | None) -> Row:
    case = Case(4, TOPK, "gather", 1000, "gather", Cost(10_000.0, 3, 0))
    return byte_row(case, 3, reported, interface)


@pytest.mark.parametrize(
    ("reported", "interface", "fault"),
    [
        (10_000, 10_000, None),
        (10_199, None, None),
        (9_801, 10_199 + 3 * FRAMING_LIMIT, None),
        (10_201, 11_000, "reported 10,201 bytes, expected 10,000 within 2%"),
        (9_799, 11_000, "reported 9,799 bytes, expected 10,000 within 2%"),
        (
            10_000,
            10_201 + 3 * FRAMING_LIMIT,
            "12,301 bytes on the interface, expected 10,000 within 2% and 700 for each",
        ),
        (10_000, 9_799, "9,799 bytes on the interface"),
    ],
)
def test_the_limits_of_a_count(reported: float, interface: float | None, fault: str | None) -> None:
    row = counted(reported, interface)
    if fault is None:
        assert row["fault"] is None
    else:
        assert row["fault"].startswith(f"4 ranks, topk:ratio=1/64,bits=2, gather: {fault}")


def test_framing_is_what_a_message_takes_beyond_its_bytes() -> None:
    assert counted(10_000, 10_900)["framing_bytes_per_message"] == 300
    assert counted(10_000, None)["framing_bytes_per_message"] is None


@pytest.mark.alone
@pytest.mark.skipif(not loopback.is_counted(), reason="Linux counts")
def test_the_loopback_interface_counts_what_is_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        there, _ = server.accept()
        with there:
            before = loopback.sent_bytes()
            client.sendall(bytes(10_000))
            assert len(there.recv(10_000, socket.MSG_WAITALL)) == 10_000
            assert loopback.sent_bytes() >= before + 10_000


def test_a_loopback_interface_that_is_never_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = itertools.count(5)
    monkeypatch.setattr(loopback, "is_counted", lambda: True)
    monkeypatch.setattr(loopback, "sent_bytes", lambda: next(counts))
    assert loopback.wait_until_quiet() == (False, next(counts) - 1)
    monkeypatch.setattr(loopback, "sent_bytes", lambda: 7)
    assert loopback.wait_until_quiet() == (True, 7)


def simulated(numel: int, spec: str = TOPK) -> dict[tuple[int, str], SimpleNamespace]:
    return {(row["world"], row["algorithm"]): SimpleNamespace(**row) for row in simulate(spec, numel)}


def test_eight_ranks_by_hand() -> None:
    """80 records of 4,096 elements: 84 bytes each, and those of a sum, with 512 elements of 4 bits, 580."""
    rows = simulated(80 * 4096)
    gather, sharded, dense = (rows[8, name] for name in ("gather", "sharded", "dense"))
    assert (gather.sent, gather.messages, gather.memory) == (7 * 80 * 84, 7, 8 * 80 * 84)
    assert (sharded.sent, sharded.messages) == ((80 * 84 + 80 * 580) * 7 / 8, 14)
    assert sharded.memory == 2 * 80 * 84 + 80 * 580 + 4 * 10 * 4096
    assert (dense.sent, dense.messages) == (2 * 4 * 80 * 4096 * 7 / 8, 14)
    assert dense.memory == 3 * 4 * 80 * 4096 + 4 * 10 * 4096
    for row in (gather, sharded, dense):
        assert row.between_nodes == row.sent
        assert (row.budget_segments, row.budget_messages, row.budget_memory) == (1, row.messages, row.memory)


def test_two_nodes_by_hand() -> None:
    """Each rank reduces an eighth, 10 records, with its peer in the other node."""
    row = simulated(80 * 4096)[16, "hierarchical, gather"]
    assert row.between_nodes == 10 * 84
    assert row.sent == 2 * 4 * 80 * 4096 * 7 / 8 + 10 * 84
    assert row.messages == 14 + 1


def test_what_is_larger_than_the_budget_is_cut() -> None:
    rows = simulated(25_000_000)
    gather, dense = rows[4096, "gather"], rows[8, "dense"]
    assert gather.memory > 1 << 28 >= (gather.budget_memory or 0)
    assert gather.budget_segments == -(-gather.memory // (1 << 28))
    assert gather.budget_messages == (gather.budget_segments + 1) * 4095  # and first, whether all is finite
    assert dense.budget_segments == 2
    assert all(row.budget_memory is not None and row.budget_memory <= 1 << 28 for row in rows.values())


def test_what_no_budget_holds_is_said() -> None:
    """With chunk=none a tensor is one record, which cannot be cut."""
    row = simulated(100_000_000, "topk:ratio=1/64,bits=2,chunk=none")[4096, "gather"]
    assert (row.budget_segments, row.budget_messages, row.budget_memory) == (None, None, None)
