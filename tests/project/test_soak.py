"""The campaign of `make soak`: each kind of attack once, and that a campaign can be stopped, resumed and repeated."""

import json
from pathlib import Path
from random import Random

import pytest

from soak.campaign import Campaign, Skipped, Tried, run_case
from support.loaded import run_command

LIMIT = 800.0
"""Seconds; on a machine with time for us it is half a minute."""
SEED = "test 6239"
"""It draws the same training for all kinds that attack one, so that the run they are compared with is trained once."""


@pytest.mark.timeout(LIMIT + 60)
def test_every_kind_once(tmp_path: Path) -> None:
    state, words = tmp_path / "state.json", ("--minutes", "0", "--seed", SEED, "--state")
    done = run_command(*words, str(state), timeout=LIMIT, program="soak.__main__")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "0 failures" in done.stdout
    tried = json.loads(state.read_text())
    assert len(tried["cases"]) + done.stdout.count("\nskipped ") == 11, done.stdout
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
    failures = json.loads(path.read_text())["failures"]
    assert 0 < len(failures) < 20
    resumed = Campaign(kinds, "0", path)
    resumed.run(0.0)
    state = json.loads(path.read_text())
    assert state["cases"] == {"attack": 21}
    assert state["counts"]["numbers"] + len(state["failures"]) == 21
    for case, error in failures.items():
        with pytest.raises(AssertionError, match=error.partition(": ")[2].splitlines()[0]):
            run_case(kinds, case)
    text = resumed.summary()
    assert "skipped skip: there is no such disk" in text
    assert all(f"FAILED {case}" in text for case in failures)
    assert f"make soak CASE={next(iter(failures))}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="is of seed 0, expected 1"):
        Campaign(kinds, "1", path)
    with pytest.raises(ValueError, match="expected KIND:SEED/NUMBER"):
        run_case(kinds, "other:0/1")
