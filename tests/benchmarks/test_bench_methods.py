"""Methods that benchmarks compare: their names, what is built of them, and the commands that have them as options."""

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import harness, methods
from benchmarks.__main__ import COMMANDS, main
from benchmarks.harness import command_line, read
from benchmarks.link import Options as LinkOptions
from benchmarks.methods import BY_LINK, BY_LOSS, BY_ROUND_TRIP, TOPK, parse
from benchmarks.recipe import Options as RecipeOptions
from benchmarks.training import check, split_for_muon
from support.processes import run_python
from thinwire.tools.train.models import model_config


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


def test_unknown_names_and_options_are_refused() -> None:
    for text, message in (
        ("local steps", "method 'local steps' is unknown, expected one of"),
        ("local steps 0", "method 'local steps 0' is unknown"),
        ("muon thinwire", "method 'muon thinwire' is unknown"),
        ("muon thinwire.AdamW default", "method 'muon thinwire.AdamW default' is unknown"),
        ("adamw zip", "method 'adamw zip' is unknown, expected one of: no communication, dense, "),
        ("local steps 8;every=4", "option 'every' of method 'local steps 8', expected one of"),
        ("adamw dense;compressor=none", "option 'compressor' of method 'adamw dense', expected one of: "),
        ("adamw dense;lr", "option 'lr' of method 'adamw dense', expected key=value"),
        ("local steps 8 zip", "compressor 'zip'"),
    ):
        with pytest.raises(ValueError, match=message):
            check(text)


def test_the_warm_up_of_a_method_is_its_own() -> None:
    """PowerSGD has two dense steps at least, and 8 bits are no warm-up of 8 bits."""
    found = {text: check(text).warmup(1) for text in (*BY_LOSS, "adamw thinwire;warmup_steps=9", "attach none")}
    own = {"adamw powersgd rank 1": 2, "adamw powersgd rank 4": 2, "adamw thinwire;warmup_steps=9": 9}
    without = ("dense", "fp16 hook", "8-bit", "none")
    assert found == {text: own.get(text, 0 if text.endswith(without) else 1) for text in found}


def test_all_methods_are_those_that_can_run() -> None:
    plain, delayed = ([one.text for one in LinkOptions(rates=(rate,)).chosen] for rate in ("1gbit", "1gbit,20ms"))
    assert plain == list(BY_LINK)
    assert delayed == [*plain, *BY_ROUND_TRIP]
    processes, threads = ([one.text for one in RecipeOptions(simulate=each).chosen] for each in (False, True))
    assert processes == list(BY_LOSS)
    assert [text for text in processes if text not in threads] == [
        "adamw fp16 hook", "adamw powersgd rank 1", "adamw powersgd rank 4",
    ]  # fmt: skip
    listed = (Path(harness.__file__).with_name("recipe.py")).read_text()
    listed = listed.partition("all, or some of: ")[2].partition('."""')[0]
    assert " ".join(listed.split()).split(", ") == list(BY_LOSS), "the help names every method"


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
        ("codec surplus", "surplus"),
        ("codec --repeats x", "--repeats"),
        ("codec --device tpu", "'tpu'"),
        ("codec --repeats 0", "--repeats 0, expected 1 or more"),
        ("codec --sizes many", "--sizes 'many', expected a whole number"),
        ("codec --specs zip", "compressor 'zip' in 'zip' is unknown"),
        ("codec --sizes 100 --out /nonexistent/rows.jsonl", "/nonexistent/rows.jsonl"),
        ("link --rates 0gbit", "rate '0gbit'"),
        ("link --rates 1gbit,20ms", "--rates 1gbit,20ms without --relay, expected rates alone"),
        ("link --relay --rates 10gbit,1ms", "--relay --rates 10gbit,1ms, expected 2gbit or less"),
        ("link --rates 1gbit 1gbit", "--rates 1gbit 1gbit, expected one or more, each once"),
        ("link --worlds 1", "--worlds 1, expected 2 to 64"),
        ("link --methods help", "method 'help' is unknown, expected one of: no communication, dense"),
        ("link --parameters nan", "--parameters nan, expected 1e4 to 1e9"),
        ("link --out /nowhere/rows.jsonl", "--out /nowhere/rows.jsonl, expected a file in an existing folder"),
        ("recipe --methods", "--methods without a method"),
        ("recipe --model llama", "model 'llama' in 'llama' is unknown, expected one of gpt, cnn"),
        ("recipe --model gpt:heads=3", "width 128 with 3 heads, expected a multiple of the heads"),
        ("recipe --model resnet18", "and digits has 1 x 8 x 8: use model cnn:size=8"),
        ("recipe --workers 1", "--workers 1, expected 2 to 64"),
        ("recipe --steps 5 --warmup-steps 5", "--warmup-steps 5, expected 0 or more, and fewer than the 5 steps"),
        ("recipe --lr 0 1", "--lr 0 1, expected two numbers above 0"),
        ("recipe --seeds", "--seeds without a seed"),
        ("recipe --simulate --methods bf16", "--methods 'bf16' with --simulate, expected no hook of torch's"),
        ("recipe --link fast", "rate 'fast', expected bits per second"),
        ("recipe --link 1gbit --simulate", "--link with --simulate"),
    ):
        assert main(command.split(" ")) == 2, command
        output = capsys.readouterr()
        assert output.out == "", command
        assert output.err.count("\n") == 1, output.err
        assert output.err.startswith(f"python -m benchmarks {command.split()[0]}: error: "), output.err
        assert message in output.err, output.err


def test_rows_keep_the_conditions_before_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"kind": "conditions", "cpu": "a"}\n{"kind": "row"}\n{"kind": "conditions", "cpu": "b"}\n{"kind": "row"}\n'
    )
    assert [row["conditions"]["cpu"] for row in read(path)] == ["a", "b"]
    path.write_text('{"kind": "row"}\n')
    with pytest.raises(ValueError, match=r":1: a line of kind 'row' before any conditions"):
        list(read(path))


def test_examples_in_docstrings() -> None:
    for module in (harness, methods):
        found = doctest.testmod(module)
        assert found.attempted > 0
        assert found.failed == 0, module
