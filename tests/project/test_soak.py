"""The campaign of `make soak`: each kind of attack once, and that a campaign can be stopped, resumed and repeated."""

import json
import os
import sys
from pathlib import Path
from random import Random

import pytest

from soak.campaign import Campaign, Skipped, Tried, run_case
from support.processes import finish

LIMIT = 800.0
"""Seconds; on a machine with time for us it is one minute."""


@pytest.mark.timeout(LIMIT + 60)
def test_every_kind_once(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    soak = (sys.executable, "-m", "soak", "--minutes", "0", "--seed", "of the tests", "--state", state)
    printed = finish(*soak, limit=LIMIT, PYTHONPATH=paths)
    assert "0 failures" in printed
    tried = json.loads(state.read_text())
    assert len(tried["cases"]) + printed.count("\nskipped ") == 11, printed
    assert tried["counts"]["frames"] >= 10_000
    assert tried["counts"]["kills"] >= 2
    assert tried["counts"]["void steps"]


def attack(draw: Random) -> Tried:
    number = draw.randrange(10)
    assert number < 7, f"drew {number}"
    return Tried(f"drew {number}", {"numbers": 1})


def skip(draw: Random) -> Tried:
    raise Skipped("there is no such disk")


def test_a_campaign_is_resumed_and_a_failure_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, kinds = tmp_path / "state.json", {"attack": (attack, 1), "skip": (skip, 1)}
    campaign = Campaign(kinds, "0", path)
    for _ in range(20):
        campaign.run_next("attack")
    resumed = Campaign(kinds, "0", path)
    resumed.run(0.0)
    state = json.loads(path.read_text())
    assert state["cases"] == {"attack": 21}
    assert 0 < len(state["failures"]) == 21 - state["counts"]["numbers"] < 20
    text, printed = resumed.summary(), capsys.readouterr().out
    assert "skipped skip: there is no such disk" in text
    for case, error in state["failures"].items():
        assert f"FAILED {case}" in text
        assert f"make soak CASE={case}" in printed
        with pytest.raises(AssertionError, match=error.partition(": ")[2].splitlines()[0]):
            run_case(kinds, case)
    with pytest.raises(ValueError, match="is of seed 0, expected 1"):
        Campaign(kinds, "1", path)
    with pytest.raises(ValueError, match="expected KIND:SEED/NUMBER"):
        run_case(kinds, "other:0/1")
