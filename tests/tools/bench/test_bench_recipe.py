"""The recipe benchmark: real trainings of a few steps, by processes and by threads; no assertion on seconds."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.commands import assert_help_loads_no_torch, assert_refused
from support.loaded import run_command
from thinwire.collectives.cost import ring
from thinwire.testing.pool import RankError
from thinwire.tools import cli, record
from thinwire.tools.bench.harness import Progress, Row
from thinwire.tools.bench.methods import BY_LOSS
from thinwire.tools.bench.recipe import Options, show, trainer
from thinwire.tools.bench.recipe.gradients import Threads
from thinwire.tools.bench.recipe.trainer import Trainer, measure
from thinwire.tools.bench.training import check

SMALL = ["--model", "gpt:layers=1,width=64,heads=2,context=16", "--batch", "2", "--steps", "6"]
TINY = "gpt:width=32,context=8"
PARAMETERS = 256 * 64 + 16 * 64 + 12 * 64 * 64 + 3 * 64
"""Of that GPT: embeddings, the matrices of a block, and three norms."""


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {line["method"]: line for line in record.read(path)}


# Whole runs ---------------------------------------------------------------------------------------------------------


def test_every_method_between_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    result = run_command("bench", "recipe", *SMALL, "--warmup-steps", "2", "--out", str(path))
    assert result.returncode == 0, result.stderr + result.stdout
    rows = rows_of(path)
    assert list(rows) == list(BY_LOSS)
    ring = 4 * PARAMETERS  # 2 (P - 1) / P is 1 for two ranks
    for name, row in rows.items():
        assert row["fault"] is None, name
        assert row["dense_per_step"] == ring
        assert "thinwire" in name or 3 < row["loss"] < 6, name  # two steps are no warm-up for a second moment
        assert name in result.stdout
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
    assert "\x1b" not in result.stdout + result.stderr
    assert "Warning" not in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("lab_can_be_built")
def test_behind_links_loss_over_time_is_recorded_and_drawn(tmp_path: Path) -> None:
    path, plot = tmp_path / "rows.jsonl", tmp_path / "time.svg"
    methods = ["adamw dense", "adamw thinwire"]
    given = [*SMALL, "--methods", *methods, "--link", "20mbit", "--out", str(path)]
    result = run_command("bench", "recipe", *given)
    assert result.returncode == 0, result.stderr + result.stdout
    for row in record.read(path):
        assert row["conditions"]["link"] == "20mbit"
        assert [step for step, _ in row["losses"]] == [1, 2, 3, 4, 5, 6], "more often than without links"
        assert row["times"] == sorted(row["times"])
        assert row["times"][-1] == row["seconds"]
    dense = rows_of(path)["adamw dense"]
    assert dense["seconds"] >= 0.9 * 8 * dense["bytes_total"] / 20e6, "no more passes than the link carries"
    assert cli.main(["bench", "results", str(path), "--plot", str(plot)]) == 0
    drawn = plot.read_text()
    assert "2 ranks behind links of 20mbit" in drawn
    assert all(f"{method}: " in drawn for method in methods)
    assert "seconds of training" in drawn


def test_threads_in_place_of_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    options = [*SMALL, "--workers", "3", "--warmup-steps", "2", "--simulate", "--out", str(path)]
    assert cli.main(["bench", "recipe", *options]) == 0
    output = capsys.readouterr()
    assert "3 ranks (threads of one process)" in output.out
    rows = rows_of(path)
    assert list(rows) == list(BY_LOSS)
    assert rows["adamw fp16 hook"]["bytes_total"] == pytest.approx(6 * ring(2 * PARAMETERS, 3))
    assert rows["adamw powersgd rank 1"]["reduction_per_step"] > rows["adamw powersgd rank 4"]["reduction_per_step"] > 5
    assert all(3 < row["loss"] < 6 for name, row in rows.items() if "thinwire" not in name)
    for name in ("adamw dense", "sgd dense"):
        assert rows[name]["bytes_per_step"] == pytest.approx(ring(4 * PARAMETERS, 3), abs=1)
        assert rows[name]["bytes_total"] == pytest.approx(6 * 4 / 3 * 4 * PARAMETERS)
    assert all(row["fault"] is None for row in rows.values())


@pytest.mark.slow
def test_the_cnn_and_several_seeds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    size = ["--model", "cnn:width=8", "--steps", "10", "--simulate"]
    options = ["--methods", "sgd dense", "sgd dense;lr=0.01", "--seeds", "1", "2", "--out", str(path)]
    assert cli.main(["bench", "recipe", *size, *options]) == 0
    rows = list(record.read(path))
    assert [(row["method"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("sgd dense", "sgd dense;lr=0.01") for seed in (1, 2)
    ]
    assert len({row["loss"] for row in rows}) == 4
    assert all([step for step, _ in row["losses"]] == [2, 4, 6, 8, 10] for row in rows)
    assert "min-max" in capsys.readouterr().out


# What is asked for --------------------------------------------------------------------------------------------------


def test_the_help_names_every_method() -> None:
    text = Path(sys.modules[Options.__module__].__file__ or "").read_text()
    listed = text.partition("all, or some of: ")[2].partition('."""')[0]
    assert " ".join(listed.split()).split(", ") == list(BY_LOSS)


def test_a_method_with_options() -> None:
    chosen = check("adamw thinwire; betas=0.7,0.999;compressor=topk:ratio=1/256,bits=4 ;max_grad_norm=None")
    assert (chosen.family, chosen.name, chosen.spec) == ("adamw", "thinwire.AdamW", "topk:ratio=1/256,bits=4")
    assert chosen.options == {"betas": (0.7, 0.999), "max_grad_norm": None}
    other = check("sgd textbook topk;compressor=quantize:bits=4;momentum=0.5")
    assert (other.name, other.spec, other.options) == ("attach", "quantize:bits=4", {"momentum": 0.5})


def test_the_warm_up_of_a_method_is_its_own() -> None:
    """PowerSGD has two dense steps at least, and 8 bits are no warm-up of 8 bits."""
    found = {text: check(text).warmup(1) for text in (*BY_LOSS, "adamw thinwire;warmup_steps=9", "attach none")}
    own = {"adamw powersgd rank 1": 2, "adamw powersgd rank 4": 2, "adamw thinwire;warmup_steps=9": 9}
    without = ("dense", "fp16 hook", "8-bit", "none")
    assert found == {text: own.get(text, 0 if text.endswith(without) else 1) for text in found}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "adamw zip"], "method 'adamw zip' is unknown, expected one of: no communication, dense, "),
        (
            ["--methods", "adamw dense;compressor=none"],
            "option 'compressor' of method 'adamw dense', expected one of: ",
        ),
        (["--methods", "adamw dense;lr"], "option 'lr' of method 'adamw dense', expected key=value"),
        (["--methods"], "--methods without a method"),
        (["--model", "llama"], "model 'llama' in 'llama' is unknown, expected one of gpt, cnn"),
        (["--model", "gpt:heads=3"], "width 128 with 3 heads, expected a multiple of the heads"),
        (["--model", "cnn:width=wide"], "'width=wide' in 'cnn:width=wide', expected key=value with a whole number"),
        (["--workers", "1"], "--workers 1, expected 2 to 64"),
        (["--batch", "0"], "--batch 0, expected 1 or more"),
        (["--steps", "0"], "--steps 0, expected 1 or more"),
        (["--steps", "5", "--warmup-steps", "5"], "--warmup-steps 5, expected 0 or more, and fewer than the 5 steps"),
        (["--lr", "0", "1"], "--lr 0 1, expected two numbers above 0"),
        (["--seeds"], "--seeds without a seed"),
        (["--link", "fast"], "rate 'fast', expected bits per second"),
        (["--link", "1gbit", "--simulate"], "--link with --simulate"),
        (["--out", "/nonexistent/rows.jsonl"], "/nonexistent/rows.jsonl"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda, but torch finds no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused("bench recipe", arguments, message, capsys)


def test_help_does_not_load_torch() -> None:
    assert_help_loads_no_torch("bench recipe")


# What is made of it -------------------------------------------------------------------------------------------------


def row(text: str, loss: float | None) -> Row:
    sent = {"bytes_total": 50.0, "bytes_per_step": 2.0, "reduction": 20.0, "reduction_per_step": 50.0}
    return {
        **sent, "method": text, "family": text.split()[0], "seed": 0, "loss": loss, "accuracy": 0.5, "seconds": 1.0,
    }  # fmt: skip


def test_ranks_that_end_with_different_weights_end_in_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "Trainer", DriftingTrainer)
    assert cli.main(["bench", "recipe", *SMALL, "--simulate", "--methods", "adamw dense"]) == 1
    assert "FAILED, adamw dense, seed 0: ranks ended with different weights" in capsys.readouterr().err


class DriftingTrainer(Trainer):
    def checksum(self) -> int:
        return self._rank


def test_a_training_that_diverges_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    show([row("adamw dense", 2.0), row("adamw dense;lr=9", loss=None)], Options(model=TINY).record())
    assert "diverged" in capsys.readouterr().out


def test_a_rank_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trainer, "Trainer", FailingTrainer)
    assert cli.main(["bench", "recipe", *SMALL, "--simulate", "--methods", "adamw dense"]) == 1
    assert capsys.readouterr().err == "thinwire bench recipe: FAILED, rank 1 of 2 raised KeyError: 'no more data'\n"


class FailingTrainer(Trainer):
    def advance(self, until: int) -> float:
        if self._rank == 1:
            raise KeyError("no more data")
        return super().advance(until)


def test_the_same_seed_gives_the_same_loss() -> None:
    given = Options(methods=("adamw dense",), steps=3, batch=2, model=TINY, simulate=True)
    losses = []
    for _ in range(2):
        with Threads() as ranks, Progress(1) as progress:
            losses += [row["loss"] for row in measure(given, ranks, progress)]
    assert losses[0] == losses[1]


def test_threads_name_the_rank_that_failed() -> None:
    with Threads() as ranks:
        ranks.form(2, Odd)
        assert ranks.ask("give", 3) == [3, 4]
        with pytest.raises(RankError, match="rank 1 of 2 raised ZeroDivisionError: division by zero"):
            ranks.ask("divide")


class Odd:
    def __init__(self, rank: int, size: int, group: object, ranks: object) -> None:
        self.rank = rank

    def give(self, number: int) -> int:
        return number + self.rank

    def divide(self) -> float:
        return 1 / (1 - self.rank)
