"""Every command in the docs is one that its program takes.

Options of `thinwire` and of `python -m benchmarks` go through the parser and the checks of the command, which does not
run. Those of torchrun go through torch's parser. A target of make, a script, a test and an extra must be there.
"""

import argparse
import importlib
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from torch.distributed.run import get_args_parser

from benchmarks import __main__ as benchmarks
from support.pages import ROOT, blocks, inline_code
from thinwire.tools import cli
from thinwire.tools.plan.options import parse_cluster, parse_model
from thinwire.tools.train import checks

PROGRAMS = ("thinwire", "make", "python", "python3", "torchrun", "pytest", "pip")
EXCEPTIONS = {
    "thinwire bench": "a command that is gone",
    "python3 -c 'from benchmarks.codec import *; run(on_gpu())'": "code that needs a GPU",
}
"""Commands that are not checked, and why."""


def parts(line: str) -> Iterator[list[str]]:
    """The commands of a line as words, without prompt, variables, comment, and `...` for what is left out."""
    for command in re.split(r"&&|\|", line.removeprefix("$ ").partition(" #")[0]):
        words = [word for word in shlex.split(command) if word != "..."]
        while words and re.fullmatch(r"\w+=.*|export", words[0]):
            words.pop(0)
        if words and words[0] in PROGRAMS:
            yield words


def commands() -> dict[str, list[str]]:
    """Each command as words, by page and text."""
    lines = [(page, " ".join(code.split())) for page, code in inline_code()]
    for block in blocks():
        if block.language in ("", "sh", "console"):
            shown = block.text.replace("\\\n", " ").splitlines()
            lines += [(block.page, line) for line in shown if block.language != "console" or line.startswith("$ ")]
    pattern = re.compile(rf"(^|&& )(\$ |export |\w+=\S* )*({'|'.join(PROGRAMS)})\b")  # no drawings
    lines = [(page, line) for page, line in lines if pattern.search(line)]
    return {f"{page}: {shlex.join(words)}": words for page, line in lines for words in parts(line)}


def check(words: list[str]) -> None:
    """Raise an error that says what is wrong with a command."""
    program, *rest = words
    if program == "thinwire":
        check_thinwire(rest)
    elif program == "make":
        check_make(rest)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert rest[0] == "install", rest
        for found in re.findall(r"^(?:thinwire|\.)\[(.+)\]$", "\n".join(rest[1:]), re.MULTILINE):
            assert set(found.split(",")) <= extras.keys(), found
    elif program == "pytest":
        assert all((ROOT / word.partition("::")[0]).exists() for word in rest if word.startswith("tests/")), rest
    elif rest[:2] == ["-m", "thinwire"]:
        check_thinwire(rest[2:])
    elif rest[:2] == ["-m", "benchmarks"]:
        check_options(benchmarks.PROGRAM, benchmarks.COMMANDS, rest[2:])
    elif rest[0] == "-m" and rest[1].startswith("benchmarks."):
        assert (ROOT / rest[1].replace(".", "/")).with_suffix(".py").is_file(), rest[1]
    elif program == "torchrun":
        given = get_args_parser().parse_args(rest)
        if given.module and given.training_script == "thinwire":
            check_thinwire(given.training_script_args)
        else:
            assert given.module or (ROOT / given.training_script).is_file(), given.training_script
    elif rest[0] == "-c":
        compile(rest[1], "-c", "exec")
    else:  # Python
        assert (ROOT / rest[0]).is_file(), rest[0]


def check_thinwire(words: list[str]) -> None:
    if words == ["--version"]:
        return
    name, options = check_options("thinwire", cli.COMMANDS, words)
    if name == "train" and options is not None:
        checks.check(options)
    elif "--params" in words:
        parse_model(options, is_measured="--world" not in words)
        if "--world" in words:
            parse_cluster(options)


def check_options(program: str, known: Mapping[str, cli.Command], words: list[str]) -> tuple[str, Any]:
    """The name of the command, and its options as they are parsed; None for its name alone, and for its help."""
    if words in ([], ["--help"]):
        return "", None
    name, *rest = words
    assert name in known, f"unknown command {words}"
    if rest == ["--help"]:
        return name, None
    module, _, function = known[name].target.partition(":")
    command = getattr(importlib.import_module(module), function)
    if "--config" in rest:  # any file will do
        file = Path(rest[rest.index("--config") + 1])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}" if file.suffix == ".json" else "")
    return name, cli._parse(f"{program} {name}", get_type_hints(command)["options"], rest)


def check_make(words: list[str]) -> None:
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    text = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^\.PHONY: (.*)", text, re.MULTILINE)[0].split()  # a folder of another name would be one, too
    for word in words:
        name, equals, _ = word.partition("=")
        assert name in targets or (equals and f"$({name})" in text), f"the Makefile has no {name}"


COMMANDS = commands()


def test_programs_take_the_commands_of_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) > 60
    assert {words[0] for words in COMMANDS.values()} >= {"thinwire", "make", "python", "torchrun", "pytest", "pip"}
    assert {shlex.join(words) for words in COMMANDS.values()} >= EXCEPTIONS.keys(), "an exception is not needed"
    for command, words in COMMANDS.items():
        if shlex.join(words) not in EXCEPTIONS:
            try:
                check(words)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{command}: {error}") from error


def test_wrong_ones_are_seen() -> None:
    for line in (
        "thinwire train --steps 0", "thinwire plan --params many --world 2 --bandwidth 1gbit --step-compute 1s",
        "thinwire frobnicate", "python -m benchmarks link --frobnicate 3", "python -m benchmarks.frobnicate",
        "pytest tests/frobnicate.py", "make frobnicate", "make soak FROBNICATE=3", "pip install 'thinwire[frobnicate]'",
        "torchrun --frobnicate 2 -m thinwire train",
        "torchrun --nnodes 2 ... -m thinwire train --frobnicate 3  # a comment",
    ):  # fmt: skip
        (words,) = parts(line)
        try:
            check(words)
        except (AssertionError, ValueError, SystemExit, argparse.ArgumentError):
            continue
        pytest.fail(f"not seen: {line}")
