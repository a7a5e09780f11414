"""The command line: lazy, with errors that are one line."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import thinwire
from support.processes import run_python
from thinwire.tools import cli, plan, report
from thinwire.tools.train import command as train
from thinwire.tools.train.config import FILE_ONLY

COMMAND = str(Path(sys.executable).with_name("thinwire"))


def run(*arguments: str, program: tuple[str, ...] = (COMMAND,)) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_help_wrong_usage_and_reports_do_not_load_torch(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "conditions", "config": {}}\n')
    lines = [
        ["--help"], ["--version"], ["train", "--help"], ["train", "--recipe", "text-gpt", "--help"], ["plan", "--help"],
        ["report", "--help"], ["train", "--recipe", "nonsense"], ["train", "--config", "/nonexistent/run.json"],
        ["train", "--frobnicate"], ["frobnicate"], ["plan"], ["plan", "--frobnicate"], ["plan", "--params", "x"],
        ["report", str(tmp_path), "--out", str(tmp_path / "report.html")],
    ]  # fmt: skip
    code = """
        import contextlib, io, json, sys
        from thinwire.tools.cli import main
        for arguments in json.loads(sys.argv[1]):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                try:
                    code = main(arguments)
                except SystemExit as error:
                    code = error.code
            assert code == (0 if {"--help", "--version", "--out"} & {*arguments} else 2), arguments
            loaded = [name for name in ("torch", "numba", "numpy") if name in sys.modules]
            assert not loaded, (arguments, loaded)
    """
    run_python(code, str(lines).replace("'", '"'))


def test_installed_command_and_module_are_the_same() -> None:
    for program in ((COMMAND,), (sys.executable, "-m", "thinwire")):
        assert run("--version", program=program).stdout == f"thinwire {thinwire.__version__}\n"
        result = run("--help", program=program)
        assert result.returncode == 0
        assert all(name in result.stdout and command.help in result.stdout for name, command in cli.COMMANDS.items())
    result = run("train", "--frobnicate", "3")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("thinwire train: error: ")
    assert "--frobnicate" in result.stderr


def test_wrong_usage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for line, message in {
        "frobnicate": "thinwire: error: unknown command 'frobnicate'; try: thinwire --help",
        "--frobnicate": "thinwire: error: unknown option '--frobnicate'; try: thinwire --help",
        "bench codec": "thinwire bench is now python -m benchmarks, run from the root of the repository",
        "train --steps": "--steps",
        "train --compressor topk:ratio=2": "ratio='2' in 'topk:ratio=2'",
        "report /nonexistent/run": "/nonexistent/run",
    }.items():
        assert cli.main(line.split()) == 2, line
        output = capsys.readouterr()
        assert (output.out, output.err.count("\n")) == ("", 1), output
        assert message in output.err, output.err
    assert cli.main([]) == 2
    assert capsys.readouterr().out.startswith("usage: thinwire COMMAND")


def test_each_command_has_few_frozen_options_with_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    most: dict[Any, int] = {train.Options: 25, plan.Options: 16, report.Options: 11}
    for name, (options, limit) in zip(("train", "plan", "report"), most.items(), strict=True):
        assert options.__dataclass_params__.frozen
        names = [field.name.replace("_", "-") for field in dataclasses.fields(options) if field.name not in FILE_ONLY]
        assert 0 < len(names) <= limit
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([name, "--help"])
        lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
        for option in names if name != "report" else ():
            (at,) = (number for number, line in enumerate(lines) if line.startswith((f"--{option} ", f"--{option},")))
            assert len(" ".join(lines[at : at + 2]).split()) > 5, lines[at]


@dataclass(frozen=True)
class Options:
    """Options of a command for the tests."""

    error: str = ""
    """What to raise."""


def command(options: Options) -> int:
    errors = {"value": ValueError("two\nlines"), "bug": RuntimeError("ours"), "stop": KeyboardInterrupt()}
    if options.error:
        raise errors[options.error]
    return 7


def test_a_command_is_one_line_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "test", cli.Command("thinwire.tools.tested:command", "tests it"))
    monkeypatch.setitem(sys.modules, "thinwire.tools.tested", sys.modules[__name__])
    assert cli.main(["test"]) == 7
    assert cli.main(["test", "--error", "value"]) == 2
    assert capsys.readouterr().err == "thinwire test: error: two lines\n"
    assert cli.main(["test", "--error", "stop"]) == 130
    with pytest.raises(RuntimeError, match="ours"):  # a bug keeps its traceback
        cli.main(["test", "--error", "bug"])
