"""The recipe benchmark: real trainings of a few steps, by processes and by threads; and the names of methods."""

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from benchmarks import harness, methods, trainer
from benchmarks.__main__ import COMMANDS, main
from benchmarks.harness import command_line, read
from benchmarks.link import Options as LinkOptions
from benchmarks.methods import BY_LOSS, TOPK, parse
from benchmarks.recipe import Options, show
from benchmarks.trainer import Trainer
from benchmarks.training import check, split_for_muon
from support.loaded import run_command
from support.processes import run_python
from thinwire.tools.train.models import model_config

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
def test_behind_links_loss_over_time_is_recorded(tmp_path: Path) -> None:
    path, methods = tmp_path / "rows.jsonl", ["adamw dense", "adamw thinwire"]
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


# Methods by name, and the commands that have them as options.


def test_names_have_families_compressors_and_options() -> None:
    given = check("muon local steps 8 quantize:bits=2;delay=4;lr=2e-3;ns_steps=3")
    assert (given.family, given.name, given.every, given.spec) == ("muon", "local steps", 8, "quantize:bits=2")
    assert given.options == {"delay": 4, "lr": 2e-3, "ns_steps": 3}
    assert parse("local steps 3").spec == TOPK
    assert parse("local steps 3").family == "adamw"
    assert [parse("dense").whole_rounds(5), parse("local steps 8").whole_rounds(9)] == [5, 16]
    chosen = check("adamw thinwire; betas=0.7,0.999;compressor=topk:ratio=1/256,bits=4 ;max_grad_norm=None")
    assert (chosen.family, chosen.name, chosen.spec) == ("adamw", "thinwire.AdamW", "topk:ratio=1/256,bits=4")
    assert chosen.options == {"betas": (0.7, 0.999), "max_grad_norm": None}
    other = check("sgd textbook topk;compressor=quantize:bits=4;momentum=0.5")
    assert (other.name, other.spec, other.options) == ("attach", "quantize:bits=4", {"momentum": 0.5})


def test_muon_gets_hidden_matrices() -> None:
    gpt = model_config("gpt:layers=2,width=32,context=8").build(0)
    hidden, others = split_for_muon(gpt)
    assert sum(one.numel() for one in hidden) == 2 * 12 * 32 * 32
    assert {id(one) for one in (*hidden, *others)} == {id(one) for one in gpt.parameters()}
    with_head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert [one.shape for one in split_for_muon(with_head)[0]] == [torch.Size([8, 4])]
    with pytest.raises(ValueError, match="Conv2d has no hidden matrix, which Muon is for: use adamw"):
        split_for_muon(nn.Conv2d(3, 8, 3))


def test_the_command_of_some_options_makes_them_again() -> None:
    given: dict[str, Any] = {"rates": ("1gbit",), "methods": ("fp16 hook",), "parameters": 1.5e6, "relay": True}
    text = command_line("link", LinkOptions(**given, out=Path("a b.jsonl")))
    assert text.startswith("python -m benchmarks link --rates 1gbit --methods 'fp16 hook'")
    assert text.endswith("--parameters 1.5e6 --relay --out 'a b.jsonl'")
    assert command_line("link", LinkOptions()) == "python -m benchmarks link"


def test_help_wrong_usage_and_results_do_not_load_torch() -> None:
    script = """
        import sys
        from benchmarks.__main__ import COMMANDS, main
        others = ["link", "--odd"], ["results", "benchmarks/results/recipe-gpt-h200.jsonl"]
        for arguments in (["--help"], ["frobnicate"], *([name, "--help"] for name in COMMANDS), *others):
            try:
                print(arguments, main(arguments))
            except SystemExit as error:
                print(arguments, error.code)
        print("loaded:", [name for name in ("torch", "numba", "numpy") if name in sys.modules])
        """
    lines = run_python(script).splitlines()
    assert lines[-2:] == ["['results', 'benchmarks/results/recipe-gpt-h200.jsonl'] 0", "loaded: []"]
    assert [line for line in lines if line.endswith(" 2")] == ["['frobnicate'] 2", "['link', '--odd'] 2"]
    assert [f"['{name}', '--help'] 0" in lines for name in COMMANDS] == [True] * len(COMMANDS)


def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "reference")
    for command, message in (
        ("codec --repeats x", "--repeats"),
        ("codec --device tpu", "'tpu'"),
        ("codec --repeats 0", "--repeats 0, expected 1 or more"),
        ("codec --sizes many", "--sizes 'many', expected a whole number"),
        ("codec --sizes 100 --out /nonexistent/rows.jsonl", "/nonexistent/rows.jsonl"),
        ("link --rates 0gbit", "rate '0gbit'"),
        ("link --rates 1gbit,20ms", "--rates 1gbit,20ms without --relay, expected rates alone"),
        ("link --relay --rates 10gbit,1ms", "--relay --rates 10gbit,1ms, expected 2gbit or less"),
        ("link --rates 1gbit 1gbit", "--rates 1gbit 1gbit, expected one or more, each once"),
        ("link --methods help", "method 'help' is unknown, expected one of: no communication, dense"),
        ("link --parameters nan", "--parameters nan, expected 1e4 to 1e9"),
        ("link --out /nowhere/rows.jsonl", "--out /nowhere/rows.jsonl, expected a file in an existing folder"),
        ("recipe --methods", "--methods without a method"),
        ("recipe --methods muon@thinwire", "method 'muon thinwire' is unknown"),
        ("recipe --methods local@steps@0", "method 'local steps 0' is unknown"),
        ("recipe --methods local@steps@8;every=4", "option 'every' of method 'local steps 8', expected one of"),
        ("recipe --methods adamw@dense;compressor=none", "option 'compressor' of method 'adamw dense', expected"),
        ("recipe --methods adamw@dense;lr", "option 'lr' of method 'adamw dense', expected key=value"),
        ("recipe --model llama", "model 'llama' in 'llama' is unknown, expected one of gpt, cnn"),
        ("recipe --model resnet18", "and digits has 1 x 8 x 8: use model cnn:size=8"),
        ("recipe --workers 1", "--workers 1, expected 2 to 64"),
        ("recipe --steps 5 --warmup-steps 5", "--warmup-steps 5, expected 0 or more, and fewer than the 5 steps"),
        ("recipe --lr 0 1", "--lr 0 1, expected two numbers above 0"),
        ("recipe --seeds", "--seeds without a seed"),
        ("recipe --simulate --methods bf16", "--methods 'bf16' with --simulate, expected no hook of torch's"),
        ("recipe --link 1gbit --simulate", "--link with --simulate"),
    ):
        assert main([word.replace("@", " ") for word in command.split(" ")]) == 2, command
        output = capsys.readouterr()
        assert output.out == "", command
        assert output.err.count("\n") == 1, output.err
        assert output.err.startswith(f"python -m benchmarks {command.split()[0]}: error: "), output.err
        assert message in output.err, output.err


def test_examples_in_docstrings() -> None:
    for module in (harness, methods):
        assert doctest.testmod(module, raise_on_error=True).attempted > 0
