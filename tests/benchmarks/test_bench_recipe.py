"""The recipe benchmark: real trainings of a few steps, by processes and by threads; no assertion on seconds."""

from pathlib import Path
from typing import Any

import pytest

import thinwire
from benchmarks import trainer
from benchmarks.__main__ import main
from benchmarks.harness import read
from benchmarks.methods import BY_LOSS, TOPK
from benchmarks.recipe import Options, show
from benchmarks.trainer import Trainer
from support.loaded import run_command

SMALL = ["--model", "gpt:layers=1,width=64,heads=2,context=16", "--batch", "2"]
LARGE_NUMEL, SMALL_NUMEL = 256 * 64 + 12 * 64 * 64, 16 * 64 + 3 * 64
"""Of that GPT: its embedding of bytes and the matrices of a block; of positions, and three norms, sent in 8 bits."""
PARAMETERS = LARGE_NUMEL + SMALL_NUMEL


def train(path: Path, *arguments: object) -> dict[str, dict[str, Any]]:
    """The rows of ranks that are threads, by method."""
    assert main(["recipe", *SMALL, "--simulate", *map(str, arguments), "--out", str(path)]) == 0
    rows = {line["method"]: line for line in read(path)}
    assert all(row["fault"] is None for row in rows.values())
    return rows


def test_every_method_between_two_processes_and_two_threads(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    given = ["--steps", "6", "--warmup-steps", "2"]
    done = run_command("recipe", *SMALL, *given, "--out", str(path), program="benchmarks.__main__")
    assert done.returncode == 0, done.stderr + done.stdout
    rows = {line["method"]: line for line in read(path)}
    assert list(rows) == list(BY_LOSS)
    ring = 4 * PARAMETERS  # 2 (P - 1) / P is 1 for two ranks
    for name, row in rows.items():
        assert row["fault"] is None, name
        assert row["dense_per_step"] == ring
        assert "thinwire" in name or 3 < row["loss"] < 6, name  # two steps are no warm-up for a second moment
        assert name in done.stdout
        assert row["conditions"]["parameters"] == PARAMETERS
    for name in ("adamw dense", "sgd dense"):
        assert rows[name]["bytes_total"] == 6 * ring
        assert rows[name]["reduction"] == rows[name]["reduction_per_step"] == 1.0
    assert rows["adamw fp16 hook"]["bytes_per_step"] == ring / 2
    # Of matrices (rows + columns) x rank, if that is less than half; the others, biases and norms whole.
    matrices = [(256, 64), (16, 64), (192, 64), (64, 64), (256, 64), (64, 256)]
    for rank in (1, 4):
        row = rows[f"adamw powersgd rank {rank}"]
        kept = [(n + m) * rank if 2 * rank * (n + m) < n * m else n * m for n, m in matrices]
        vectors = PARAMETERS - sum(n * m for n, m in matrices)
        assert row["bytes_per_step"] == 4 * (sum(kept) + vectors)
        assert row["bytes_total"] == 2 * ring + 4 * row["bytes_per_step"]
    assert 3 < rows["adamw thinwire 8-bit"]["reduction"] < 4  # small tensors go whole
    for name in ("adamw thinwire", "sgd thinwire", "adamw textbook topk", "sgd textbook topk"):
        assert rows[name]["reduction_per_step"] > 20, name
        assert 8 < rows[name]["reduction"] < rows[name]["reduction_per_step"]
    assert "Warning" not in done.stderr
    threads = train(path, *given)
    assert list(threads) == [one.text for one in Options(simulate=True).chosen]
    for name in ("adamw dense", "sgd dense"):  # on the same samples
        assert [loss for _, loss in threads[name]["losses"]] == pytest.approx(
            [loss for _, loss in rows[name]["losses"]], rel=1e-4
        )
        assert threads[name]["bytes_total"] == 6 * ring


@pytest.mark.slow
@pytest.mark.usefixtures("lab_can_be_built")
def test_behind_links_loss_over_time_is_recorded_and_drawn(tmp_path: Path) -> None:
    path, plot, methods = tmp_path / "rows.jsonl", tmp_path / "time.svg", ["adamw dense", "adamw thinwire"]
    given = ["recipe", *SMALL, "--steps", "6", "--methods", *methods, "--link", "20mbit", "--out", str(path)]
    done = run_command(*given, program="benchmarks.__main__")
    assert done.returncode == 0, done.stderr + done.stdout
    rows = list(read(path))
    for row in rows:
        assert row["conditions"]["link"] == "20mbit"
        assert [step for step, _ in row["losses"]] == [1, 2, 3, 4, 5, 6], "more often than without links"
        assert row["times"] == sorted(row["times"])
        assert row["times"][-1] == row["seconds"]
    assert rows[0]["seconds"] >= 0.9 * 8 * rows[0]["bytes_total"] / 20e6, "no more passes than the link carries"
    assert main(["results", str(path), "--plot", str(plot)]) == 0
    drawn = plot.read_text()
    assert "2 ranks behind links of 20mbit" in drawn
    assert all(f"{method}: " in drawn for method in methods)


def test_seeds_precision_and_the_text_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, path = tmp_path / "text.txt", tmp_path / "rows.jsonl"
    text.write_bytes(bytes(range(256)) * 100)
    learnt = train(path, "--steps", 30, "--methods", "adamw dense;lr=1e-2", "--data-dir", text)
    assert learnt["adamw dense;lr=1e-2"]["loss"] < 4.5, "what comes next is easy to learn: below the 5.5 of a guess"
    given = "--steps", 10, "--methods", "sgd dense", "sgd dense;lr=0.01", "--seeds", 1, 2, "--bf16"
    again = train(path, *given)
    assert train(path, *given)["sgd dense"]["losses"] == again["sgd dense"]["losses"], "the same seed, the same loss"
    rows = list(read(path))
    names = [(name, seed) for name in ("sgd dense", "sgd dense;lr=0.01") for seed in (1, 2)]
    assert [(row["method"], row["seed"]) for row in rows] == names
    assert len({row["loss"] for row in rows}) == 4
    assert all([step for step, _ in row["losses"]] == [2, 4, 6, 8, 10] for row in rows)
    capsys.readouterr()
    show([{**rows[0], "loss": None}, *rows[2:]], rows[0]["conditions"])
    printed = capsys.readouterr().out
    assert " | diverged | 1 to 2 | 1.0x |" in printed
    assert "gpt (layers=1, width=64, heads=2, context=16" in printed


def test_a_round_of_one_step_without_compression_is_dense_training(tmp_path: Path) -> None:
    """The mean of what SGD makes of each gradient is what it makes of their mean."""
    methods = "sgd dense", "sgd local steps 1 none", "sgd local steps 5 none"
    rows = train(tmp_path / "rows.jsonl", "--steps", 5, "--methods", *methods)
    dense, each, last = (rows[name]["losses"] for name in methods)
    assert [step for step, _ in dense] == [step for step, _ in each] == [1, 2, 3, 4, 5]
    assert [loss for _, loss in each] == pytest.approx([loss for _, loss in dense], rel=1e-4)
    assert [step for step, _ in last] == [5]
    assert last[0][1] != pytest.approx(dense[-1][1], rel=1e-6), "ranks have gone apart for five steps"


def test_bytes_are_those_of_whole_rounds_and_ranks_end_alike(tmp_path: Path) -> None:
    names = ("adamw local steps 4", "adamw local steps 8", "adamw local steps 4;fragments=2;delay=2")
    muons = "muon dense", "muon local steps 4 quantize:bits=2"
    rows = train(tmp_path / "rows.jsonl", "--steps", 16, "--methods", *names, *muons)
    four, eight, parts, muon = (row for name, row in rows.items() if "local" in name)
    assert four["bytes_total"] == 2 * eight["bytes_total"]
    payload = thinwire.compressor(TOPK).nbytes(LARGE_NUMEL) + thinwire.Quantize(bits=8).nbytes(SMALL_NUMEL)
    assert four["bytes_total"] == pytest.approx(4 * payload, rel=0.02)
    assert four["sent"] == [four["bytes_total"] * step / 16 for step, _ in four["losses"]]
    assert [step for step, _ in eight["losses"]] == [8, 16]
    assert parts["bytes_total"] >= four["bytes_total"]
    assert muon["family"] == "muon"


class DriftingTrainer(Trainer):
    def checksum(self) -> int:
        return self._rank


class FailingTrainer(Trainer):
    def advance(self, until: int) -> float:
        if self._rank == 1:
            raise KeyError("no more data")
        return super().advance(until)


def test_what_goes_wrong_on_ranks_ends_in_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["recipe", *SMALL, "--steps", "6", "--simulate", "--methods", "adamw dense"]
    monkeypatch.setattr(trainer, "Trainer", DriftingTrainer)
    assert main(given) == 1
    assert "FAILED, adamw dense, seed 0: ranks ended with different weights" in capsys.readouterr().err
    monkeypatch.setattr(trainer, "Trainer", FailingTrainer)
    assert main(given) == 1
    failed = "python -m benchmarks recipe: FAILED, rank 1 of 2 raised KeyError: 'no more data'\n"
    assert capsys.readouterr().err == failed
