"""`thinwire train --link`: links of a rate between ranks of this machine, and what it says of dense training."""

import json
import re
from pathlib import Path

import pytest

from support.training_runs import SMALL, TORCHRUN, Done, arguments, changed, lines, run

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
    assert done.out.index("dense training") > done.out.index("MB on the interface")


def test_dense_training_waits_for_the_link(tmp_path: Path) -> None:
    done = run(tmp_path, *arguments(CONFIG))
    assert done.code == 0, done.err
    assert done.err.startswith("links of 20mbit for each rank, through a relay\n")
    assert_sentence_is_that_of_the_metrics(done, tmp_path / "run")
    dense = last_line(tmp_path / "run" / "dense")
    assert dense["seconds"] >= 0.9 * 8 * dense["bytes_sent"] / 20e6, "no more passes than the link carries"
    conditions = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().partition("\n")[0])
    assert conditions["compile_seconds"] > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--link", "fast"], "rate 'fast', expected bits per second"),
        (["--link", "10gbit"], "expected 100 kbit/s to 2 Gbit/s through a relay"),
        (["--link", "1gbit,fast"], "link '1gbit,fast', expected a rate, or a rate and a round-trip time"),
        (["--link", "1gbit", "--device", "cuda"], "--link with --device cuda"),
        (["--link", "1gbit", "--recipe", "text-gpt", "--workers", "4", "--shard", "2"], "--link with --shard 2"),
        (["--link", "1gbit", "--recipe", "mnist-cnn", "--download"], "ranks behind links reach no other network"),
    ],
)
def test_wrong_links_are_refused(tmp_path: Path, given: list[str], message: str) -> None:
    done = run(tmp_path, *given)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not list(tmp_path.glob("run*"))


def test_torchrun_has_links_of_its_own(tmp_path: Path) -> None:
    start = (*TORCHRUN, "--standalone", "--nproc-per-node", "1", "-m", "thinwire", "train")
    done = run(tmp_path, "--link", "1gbit", program=start)
    assert done.code != 0
    assert "under torchrun" in done.err
