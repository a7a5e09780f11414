"""`thinwire bench link`: real ranks over shaped links, through the installed command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire import cli, record
from thinwire.bench.link import lab

COMMAND = str(Path(sys.executable).with_name("thinwire"))
OURS = "thinwire.AdamW topk:ratio=1/64,bits=2"


def test_bytes_on_the_interface_are_those_that_each_way_sends(tmp_path: Path) -> None:
    reason = lab.why_not()
    if reason is not None:
        assert not os.environ.get("CI"), f"in CI the lab must run: {reason}"
        pytest.skip(reason)
    rows = tmp_path / "rows.jsonl"
    arguments = ["--rates", "200mbit", "--parameters", "1e6", "--steps", "8", "--batch", "4", "--out", str(rows)]
    ways = ["no communication", "dense", "fp16 hook", "bf16", "attach quantize:bits=8", OURS]
    done = subprocess.run(
        [COMMAND, "bench", "link", *arguments, "--ways", *ways],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {row["way"]: row for row in record.read(rows)}
    assert list(found) == ways
    sent = {way: row["bytes_per_step"] for way, row in found.items()}
    numel = 6 * (12 * 120 * 120 + 13 * 120)  # of six blocks of width 120, as the formula of models.py rounds it
    assert sent["no communication"] < 1000
    for way, each in {"dense": 4, "fp16 hook": 2, "bf16": 2, "attach quantize:bits=8": 1.01}.items():
        assert each * numel < sent[way] < 1.1 * each * numel, way  # TCP's and Ethernet's headers take 6 %
    assert sent[OURS] < sent["dense"] / 20
    assert found["dense"]["ms"] > 2 * found["no communication"]["ms"]  # 4 MB at 200 Mbit/s take 160 ms
    for way in ways:
        assert re.search(rf"{re.escape(way)} +[\d,.]+ +[\d,.]+ +[\d.]+", done.stdout), done.stdout
    assert not list(Path("/run/netns").glob("thinwire-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "fast"], "rate 'fast', expected one from 100kbit to 1000gbit"),
        (["--rates", "0gbit"], "rate '0gbit'"),
        (["--worlds", "1"], "--worlds 1, expected 2 to 64"),
        (["--ways", "help"], "--ways help, expected all, or some of: no communication, dense"),
        (["--steps", "0"], "--steps 0, expected 1 or more"),
        (["--parameters", "-3"], "--parameters -3, expected 1e4 to 1e9"),
    ],
)
def test_nonsense_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if lab.why_not() is not None:
        message = "no links can be made here"
    assert cli.main(["bench", "link", *arguments]) == 2
    assert message in capsys.readouterr().err
