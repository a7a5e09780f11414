"""`thinwire bench step`: a small run, as a user would start it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.tools.bench.methods import BY_STEP
from thinwire.tools.cli import main

SMALL = "gpt:layers=1,width=64,heads=2,context=16"


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "bench", "step", "--model", SMALL, "--large-model", SMALL, "--rounds", "2",
         "--out", str(out)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    conditions, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert conditions["workers"] == 2
    assert all(row["parameters"] > 0 for row in rows)
    assert [row["method"] for row in rows] == list(BY_STEP)
    for row in rows:
        assert row["ms"] > 0
        assert row["memory"] > 0
        assert row["method"] in done.stdout
        assert (row["times_dense"] == 1.0) == row["method"].endswith(" dense")


@pytest.mark.parametrize("option", [["--rounds", "0"], ["--model", "mlp"], ["--large-model", "cnn"]])
def test_wrong_arguments_are_one_line(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *option]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
