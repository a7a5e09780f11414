"""The recipe benchmark: real trainings of a few steps, by processes and by threads; no assertion on seconds."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.tools import cli, record
from thinwire.tools.bench.progress import Progress
from thinwire.tools.bench.recipe import Options, measured
from thinwire.tools.bench.recipe.exchanges import ring_bytes
from thinwire.tools.bench.recipe.measured import Row, measure_all
from thinwire.tools.bench.recipe.recipes import RECIPES, parse
from thinwire.tools.bench.recipe.settings import settings
from thinwire.tools.bench.recipe.table import print_rows
from thinwire.tools.bench.recipe.threads import Threads
from thinwire.tools.bench.recipe.trainer import Score, Trainer
from thinwire.tools.workers import WorkerError

COMMAND = str(Path(sys.executable).with_name("thinwire"))
SMALL = ["--model", "gpt:layers=1,width=64,heads=2,context=16", "--batch", "2", "--steps", "6"]
TINY = "gpt:width=32,context=8"
PARAMETERS = 256 * 64 + 16 * 64 + 12 * 64 * 64 + 3 * 64
"""Of that GPT: embeddings, the matrices of a block, and three norms."""


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {line["recipe"]: line for line in record.read(path)}


# Whole runs ---------------------------------------------------------------------------------------------------------


def test_every_recipe_between_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    result = subprocess.run(
        [COMMAND, "bench", "recipe", *SMALL, "--warmup-steps", "2", "--out", str(path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    rows = rows_of(path)
    assert list(rows) == list(RECIPES)
    ring = 4 * PARAMETERS  # 2 (P - 1) / P is 1 for two ranks
    for name, row in rows.items():
        assert row["same_weights"], name
        assert row["dense_per_step"] == ring
        assert "thinwire" in name or 3 < row["loss"] < 6, name  # two steps are no warm-up for a second moment
        assert name in result.stdout
        assert row["conditions"]["parameters"] == PARAMETERS
    for name in ("adamw dense", "sgd dense"):
        assert rows[name]["bytes_total"] == 6 * ring
        assert rows[name]["ratio"] == rows[name]["ratio_per_step"] == 1.0
    assert rows["adamw fp16 hook"]["bytes_per_step"] == ring / 2
    # Of matrices (rows + columns) x rank, if that is less than half; the others, biases and norms whole.
    matrices = [(256, 64), (16, 64), (192, 64), (64, 64), (256, 64), (64, 256)]
    for rank in (1, 4):
        row = rows[f"adamw powersgd rank {rank}"]
        kept = [(n + m) * rank if 2 * rank * (n + m) < n * m else n * m for n, m in matrices]
        vectors = PARAMETERS - sum(n * m for n, m in matrices)
        assert row["bytes_per_step"] == 4 * (sum(kept) + vectors)
        assert row["bytes_total"] == 2 * ring + 4 * row["bytes_per_step"]
    assert 3 < rows["adamw thinwire 8-bit"]["ratio"] < 4  # small tensors go whole
    for name in ("adamw thinwire", "sgd thinwire", "adamw textbook topk", "sgd textbook topk"):
        assert rows[name]["ratio_per_step"] > 20, name
        assert 8 < rows[name]["ratio"] < rows[name]["ratio_per_step"]
    assert "\x1b" not in result.stdout + result.stderr
    assert "Warning" not in result.stderr


def test_threads_in_place_of_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    options = [*SMALL, "--workers", "3", "--warmup-steps", "2", "--simulate", "--out", str(path)]
    assert cli.main(["bench", "recipe", *options]) == 0
    output = capsys.readouterr()
    assert "3 workers (threads of one process)" in output.out
    rows = rows_of(path)
    assert list(rows) == list(RECIPES)
    assert rows["adamw fp16 hook"]["bytes_total"] == pytest.approx(6 * ring_bytes(2 * PARAMETERS, 3))
    assert rows["adamw powersgd rank 1"]["ratio_per_step"] > rows["adamw powersgd rank 4"]["ratio_per_step"] > 5
    assert all(3 < row["loss"] < 6 for name, row in rows.items() if "thinwire" not in name)
    for name in ("adamw dense", "sgd dense"):
        assert rows[name]["bytes_per_step"] == pytest.approx(ring_bytes(4 * PARAMETERS, 3))
        assert rows[name]["bytes_total"] == pytest.approx(6 * 4 / 3 * 4 * PARAMETERS)
    assert all(row["same_weights"] for row in rows.values())


def test_the_cnn_and_several_seeds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    size = ["--model", "cnn:width=8", "--steps", "10", "--simulate"]
    options = ["--recipes", "sgd dense", "sgd dense;lr=0.01", "--seeds", "1", "2", "--out", str(path)]
    assert cli.main(["bench", "recipe", *size, *options]) == 0
    rows = list(record.read(path))
    assert [(row["recipe"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("sgd dense", "sgd dense;lr=0.01") for seed in (1, 2)
    ]
    assert len({row["loss"] for row in rows}) == 4
    assert all([step for step, _ in row["losses"]] == [2, 4, 6, 8, 10] for row in rows)
    assert "min-max" in capsys.readouterr().out


# What is asked for --------------------------------------------------------------------------------------------------


def test_the_help_names_every_recipe() -> None:
    text = Path(sys.modules[Options.__module__].__file__ or "").read_text()
    listed = text.partition("all, or some of: ")[2].partition('."""')[0]
    assert " ".join(listed.split()).split(", ") == list(RECIPES)


def test_a_recipe_with_options() -> None:
    chosen = parse("adamw thinwire; betas=0.7,0.999;compressor=topk:ratio=1/256,bits=4 ;max_grad_norm=None")
    assert chosen.name == "adamw thinwire"
    assert chosen.options == {
        "betas": (0.7, 0.999),
        "compressor": "topk:ratio=1/256,bits=4",
        "max_grad_norm": None,
    }
    assert parse("sgd textbook topk;compressor=quantize:bits=4;momentum=0.5").options["momentum"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", "adamw zip"], "recipe 'adamw zip' is unknown, expected one of: adamw dense, "),
        (
            ["--recipes", "adamw dense;compressor=none"],
            "option 'compressor=none' of recipe 'adamw dense', expected key",
        ),
        (["--recipes", "adamw dense;lr"], "option 'lr' of recipe 'adamw dense', expected key=value"),
        (["--recipes"], "--recipes without a recipe"),
        (["--model", "llama"], "model 'llama' in 'llama' is unknown, expected one of gpt, cnn"),
        (["--model", "gpt:heads=3"], "width 128 with 3 heads, expected a multiple of the heads"),
        (["--model", "cnn:width=wide"], "'width=wide' in 'cnn:width=wide', expected key=value with a whole number"),
        (["--workers", "1"], "--workers 1, expected 2 to 64"),
        (["--batch", "0"], "--batch 0, expected 1 or more"),
        (["--steps", "0"], "--steps 0, expected 1 or more"),
        (["--steps", "5", "--warmup-steps", "5"], "--warmup-steps 5, expected 0 or more, and fewer than the 5 steps"),
        (["--lr", "0", "1"], "--lr 0 1, expected two numbers above 0"),
        (["--seeds"], "--seeds without a seed"),
        (["--out", "/nonexistent/rows.jsonl"], "/nonexistent/rows.jsonl"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda, but torch finds no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "recipe", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("thinwire bench recipe: error: ")
    assert message in output.err


def test_help_does_not_load_torch() -> None:
    script = (
        "import sys\n"
        "from thinwire.tools.cli import main\n"
        "try:\n"
        "    main(['bench', 'recipe', '--help'])\n"
        "finally:\n"
        "    print('loaded:', [name for name in ('torch', 'numba', 'numpy') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.endswith("loaded: []\n")


# What is made of it -------------------------------------------------------------------------------------------------


def row(text: str = "adamw dense", **changed: Any) -> Row:
    given = settings(Options(recipes=(text,), steps=10, model=TINY))
    values = {
        "case": given.cases[0],
        "scores": {10: Score(2.0, 0.5)},
        "bytes_total": 50.0,
        "bytes_per_step": 2.0,
        "dense_total": 1000.0,
        "dense_per_step": 100.0,
        "seconds": 1.0,
        "checksums": (7, 7),
    }
    return Row(**{**values, **changed})


def test_ratios() -> None:
    assert (row().ratio, row().ratio_per_step) == (20.0, 50.0)
    assert row(bytes_total=0.0).record()["ratio"] is None


def test_ranks_that_end_with_different_weights_end_in_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert row().fault is None
    monkeypatch.setattr(measured, "Trainer", DriftingTrainer)
    assert cli.main(["bench", "recipe", *SMALL, "--simulate", "--recipes", "adamw dense"]) == 1
    assert "FAILED, adamw dense, seed 0: ranks ended with different weights" in capsys.readouterr().err


class DriftingTrainer(Trainer):
    def checksum(self) -> int:
        return self._rank


def test_a_training_that_diverges_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    diverged = row("adamw dense;lr=9", scores={10: Score(float("nan"), 0.0)})
    assert diverged.record()["loss"] is None
    print_rows(settings(Options(recipes=("adamw dense",), model=TINY)), [row(), diverged])
    assert "diverged" in capsys.readouterr().out


def test_a_rank_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measured, "Trainer", FailingTrainer)
    assert cli.main(["bench", "recipe", *SMALL, "--simulate", "--recipes", "adamw dense"]) == 1
    assert capsys.readouterr().err == "thinwire bench recipe: FAILED, rank 1 of 2 raised KeyError: 'no more data'\n"


class FailingTrainer(Trainer):
    def advance(self, until: int) -> float:
        if self._rank == 1:
            raise KeyError("no more data")
        return super().advance(until)


def test_the_same_seed_gives_the_same_loss() -> None:
    given = settings(Options(recipes=("adamw dense",), steps=3, batch=2, model=TINY, simulate=True))
    losses = []
    for _ in range(2):
        with Threads() as ranks, Progress(1) as progress:
            losses += [row.loss for row in measure_all(given, ranks, progress)]
    assert losses[0] == losses[1]


def test_threads_tell_who_failed() -> None:
    with Threads() as ranks:
        ranks.form(2, Odd)
        assert ranks.ask("give", 3) == [3, 4]
        with pytest.raises(WorkerError, match="rank 1 of 2 raised ZeroDivisionError: division by zero"):
            ranks.ask("divide")


class Odd:
    def __init__(self, rank: int, size: int, group: object, ranks: object) -> None:
        self.rank = rank

    def give(self, number: int) -> int:
        return number + self.rank

    def divide(self) -> float:
        return 1 / (1 - self.rank)
