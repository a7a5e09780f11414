"""thinwire train --compressor auto: it measures, says what it chose, and a resumed run goes on with that."""

import shutil
from pathlib import Path

import pytest

from support.slow import slow
from support.training_runs import SMALL, assert_same_weights, changed, checkpoints, copy_run, lines, newest, train
from thinwire.testing import RankPool
from thinwire.tools.train.checks import check

OVER = 34
"""Steps after which there is a choice."""
AUTO = changed(SMALL, compressor="auto", steps=OVER + 12, checkpoint_every=OVER + 4, keep=9)


@pytest.mark.parametrize("optimizer", [slow("adamw"), "sgd"])
def test_it_says_what_it_chose_and_goes_on_with_it(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    config = changed(AUTO, optimizer=optimizer, out=tmp_path / "run")
    check(config)
    shown = train(ranks, 2, config, tmp_path)
    (choice,) = lines(tmp_path / "run", "choice")
    assert choice["step"] <= OVER
    assert choice["candidates"][0] == "none"
    assert choice["compressor"] in choice["candidates"]
    assert all(seconds > 0 for seconds in choice["step_seconds"])
    assert f"auto: {choice['reason']}" in shown.err

    again = copy_run(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(newest(again))
    (again / "weights.pt").unlink()
    assert checkpoints(again) == [OVER + 4]
    train(ranks, 2, changed(config, out=again, resume="auto"), tmp_path)
    assert lines(again, "choice") == [choice]  # not measured again
    assert_same_weights(tmp_path / "run", again)
