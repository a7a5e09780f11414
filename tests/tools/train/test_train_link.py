"""`thinwire train --link`: links of a rate between ranks of this machine, and what it says of dense training."""

import re
from pathlib import Path

import pytest

from support.training_runs import SMALL, Done, arguments, changed, lines, run

CONFIG = changed(SMALL, link="20mbit", compare_dense=True, checkpoint_every=0, out=Path("run"))


def last_line(folder: Path) -> dict[str, float]:
    (end,) = lines(folder, "end")
    return end


def assert_sentence_is_that_of_the_metrics(done: Done, folder: Path) -> None:
    """The last sentence, from what metrics.jsonl has of both trainings."""
    ours, dense = last_line(folder), last_line(folder / "dense")
    found = re.search(r"dense training: ([\d.]+)x as fast, ([\d.]+) % of the bytes, accuracy ([\d.]+)% \(", done.out)
    assert found, done.out
    rounded = {"rel": 0.06, "abs": 0.051}  # to two digits, and below 1 to one
    assert float(found[1]) == pytest.approx(dense["seconds"] / ours["seconds"], **rounded)
    assert float(found[2]) == pytest.approx(100 * ours["bytes_sent"] / dense["bytes_sent"], **rounded)
    assert float(found[3]) == pytest.approx(100 * lines(folder, "evaluation")[-1]["accuracy"], abs=0.06)


def test_dense_training_waits_for_the_link(tmp_path: Path) -> None:
    done = run(tmp_path, *arguments(CONFIG))
    assert done.code == 0, done.err
    assert done.err.startswith("links of 20mbit for each rank, through a relay\n")
    assert_sentence_is_that_of_the_metrics(done, tmp_path / "run")
    dense = last_line(tmp_path / "run" / "dense")
    assert dense["seconds"] >= 0.9 * 8 * dense["bytes_sent"] / 20e6, "no more passes than the link carries"
