"""The command line: lazy, with errors that are one line."""

import dataclasses
import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

import thinwire
from thinwire.tools import cli
from thinwire.tools.train.config import FILE_ONLY

COMMAND = str(Path(sys.executable).with_name("thinwire"))


def run(*arguments: str, program: tuple[str, ...] = (COMMAND,)) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["bench", "--help"],
        ["bench", "codec", "--help"],
        ["bench", "codec", "--frobnicate"],
        ["bench", "nonsense"],
        ["train", "--help"],
        ["train", "--recipe", "text-gpt", "--help"],
        ["train", "--recipe", "nonsense"],
        ["train", "--config", "/nonexistent/run.toml"],
        ["report", "--help"],
    ],
)
def test_help_and_wrong_usage_do_not_load_torch(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from thinwire.tools.cli import main\n"
        "try:\n"
        f"    code = main({arguments!r})\n"
        "except SystemExit as error:\n"
        "    code = error.code\n"
        "print('loaded:', [name for name in ('torch', 'numba', 'numpy') if name in sys.modules])\n"
        "sys.exit(code)\n"
    )
    result = run("-c", script, program=(sys.executable,))
    assert result.stdout.endswith("loaded: []\n")
    assert result.returncode == (0 if {"--help", "--version"} & set(arguments) else 2)


@pytest.mark.parametrize("program", [(COMMAND,), (sys.executable, "-m", "thinwire")])
def test_installed_command_and_module_are_the_same(program: tuple[str, ...]) -> None:
    assert run("--version", program=program).stdout == f"thinwire {thinwire.__version__}\n"
    result = run("--help", program=program)
    assert result.returncode == 0
    assert all(name in result.stdout and command.help in result.stdout for name, command in cli.COMMANDS.items())
    assert run("bench", "--help", program=program).stdout.startswith("usage: thinwire bench COMMAND")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_is_a_function_of_few_frozen_options(name: str) -> None:
    module, _, function = cli.COMMANDS[name].target.partition(":")
    options = get_type_hints(getattr(importlib.import_module(f"thinwire.tools.{module}"), function))["options"]
    assert dataclasses.is_dataclass(options)
    assert options.__dataclass_params__.frozen
    most = {"train": 25, "bench recipe": 15, "plan": 16}.get(name, 11)
    assert 0 < len([field for field in dataclasses.fields(options) if field.name not in FILE_ONLY]) <= most


def test_every_option_has_help() -> None:
    result = run("bench", "codec", "--help")
    assert result.returncode == 0
    lines = [line.strip("│ ") for line in result.stdout.splitlines()]
    for option in ("--specs", "--sizes", "--dtypes", "--device", "--repeats", "--out"):
        at = next(n for n, line in enumerate(lines) if line.startswith(option))
        assert len(lines[at].split()) > 4, lines[at]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "thinwire: error: unknown command 'frobnicate'; try: thinwire --help"),
        (["--frobnicate"], "thinwire: error: unknown option '--frobnicate'; try: thinwire --help"),
        (["bench", "nonsense"], "thinwire bench: error: unknown command 'nonsense'; try: thinwire bench --help"),
        (["bench", "codec", "--frobnicate", "3"], "--frobnicate"),
        (["bench", "codec", "surplus"], "surplus"),
        (["bench", "codec", "--repeats", "x"], "--repeats"),
        (["bench", "codec", "--repeats"], "--repeats"),
        (["bench", "codec", "--device", "tpu"], "'tpu'"),
        (["bench", "codec", "--dtypes", "int8"], "'int8'"),
        (["bench", "codec", "--repeats", "0"], "--repeats 0, expected 1 or more"),
        (["bench", "codec", "--sizes", "many"], "--sizes 'many', expected a whole number"),
        (["bench", "codec", "--sizes"], "--sizes without a size"),
        (["bench", "codec", "--specs", "zip"], "compressor 'zip' in 'zip' is unknown"),
        (["bench", "codec", "--specs", "topk:ratio=2"], "ratio='2' in 'topk:ratio=2'"),
        (["bench", "codec", "--sizes", "100", "--out", "/nonexistent/rows.jsonl"], "/nonexistent/rows.jsonl"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "reference")
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("thinwire")
    assert message in output.err


def test_unknown_kernels_are_one_line() -> None:
    result = subprocess.run(
        [COMMAND, "bench", "codec", "--sizes", "100"],
        env={"THINWIRE_KERNELS": "abacus"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "unknown backend 'abacus'" in result.stderr


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert capsys.readouterr().out.startswith("usage: thinwire COMMAND")


@dataclass(frozen=True)
class Options:
    """Options of a command for the tests."""

    error: str = ""
    """What to raise."""


def command(options: Options) -> int:
    if options.error:
        raise {"value": ValueError("two\nlines"), "bug": RuntimeError("ours"), "stop": KeyboardInterrupt()}[
            options.error
        ]
    return 7


def test_a_command_is_one_line_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "test it", cli.Command("tested:command", "tests it"))
    monkeypatch.setitem(sys.modules, "thinwire.tools.tested", sys.modules[__name__])
    assert cli.main(["test", "it"]) == 7
    assert cli.main(["test", "it", "--error", "value"]) == 2
    assert capsys.readouterr().err == "thinwire test it: error: two lines\n"
    assert cli.main(["test", "it", "--error", "stop"]) == 130
    with pytest.raises(RuntimeError, match="ours"):  # a bug keeps its traceback
        cli.main(["test", "it", "--error", "bug"])
