"""The `thinwire` command: a table of commands, each imported only when it is called. Benchmarks have a table, too.

A command is a function with one argument, `options`, which is a frozen dataclass. It returns the exit code. tyro builds
the command line from the dataclass and shows the docstring under each field as help. To add a command, add a line to
`COMMANDS`.

Exit codes: 0 success; 1 the command ran and found something wrong; 2 wrong usage; 130 interrupted. A ValueError or
OSError from a command is caused by the user's input and is printed as one line. Any other exception is a bug and keeps
its traceback.
"""

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, get_type_hints

from .. import __doc__ as _PACKAGE_DOC
from .. import __version__


class Command(NamedTuple):
    """A command: the function to call, and its line in the help."""

    target: str  # Function to call, as module:function
    help: str


COMMANDS = {
    "train": Command("thinwire.tools.train.command:run", "train a model between ranks that send few bytes"),
    "plan": Command(
        "thinwire.tools.plan:run", "predict what compression brings, from numbers or measured, and what to use"
    ),
    "report": Command("thinwire.tools.report:run", "one HTML page of trainings: loss, accuracy, bytes and time"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line of `thinwire` and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"thinwire {__version__}")
        return 0
    if given[:1] == ["bench"]:
        return _fail("thinwire", "thinwire bench is now python -m benchmarks, run from the root of the repository")
    return run_command("thinwire", COMMANDS, given, about=(_PACKAGE_DOC or "").splitlines()[0])


def run_command(program: str, commands: Mapping[str, Command], given: Sequence[str], *, about: str) -> int:
    """Run one command line of a program and return the exit code."""
    name, *rest = given or [""]
    if name in commands:
        return _run(f"{program} {name}", commands[name], rest)
    if name in ("", "-h", "--help"):
        print(_help(program, commands, about))
        return 0 if name else 2
    kind = "option" if name.startswith("-") else "command"
    return _fail(program, f"unknown {kind} {name!r}; try: {program} --help")


def _run(prog: str, command: Command, arguments: list[str]) -> int:
    module, _, name = command.target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        options = _parse(prog, get_type_hints(function)["options"], arguments)
        return int(function(options))
    except (ValueError, OSError) as error:
        return _fail(prog, str(error))
    except KeyboardInterrupt:
        return 130


def _parse(prog: str, options: Any, arguments: list[str]) -> Any:
    import tyro  # imported here, because `thinwire --help` does not need it

    given: dict[str, Any] = {"prog": prog, "args": arguments}
    if hasattr(options, "defaults"):  # these defaults depend on the arguments
        given["default"] = options.defaults(arguments)
    if {"-h", "--help"} & set(arguments):
        return tyro.cli(options, **given)
    from unittest.mock import patch  # which `thinwire --help` need not load

    # tyro draws a box around its errors. Drawn wide enough that no line breaks, its first paragraph is the message.
    drawn = io.StringIO()
    try:
        with contextlib.redirect_stderr(drawn), patch.dict(os.environ, COLUMNS="10000"):
            return tyro.cli(options, **given)
    except SystemExit as exit:
        if not exit.code:
            raise
        raise ValueError(f"{_first_paragraph(drawn.getvalue())}; try: {prog} --help") from None


def _first_paragraph(box: str) -> str:
    r"""Return the text of a drawn box between its title and the first rule, as one line.

    >>> _first_paragraph("╭─ Error ─╮\n│ bad     │\n│ option  │\n│ ─────── │\n│ help    │\n╰─────────╯")
    'bad option'
    """
    lines = (line.strip("│| ") for line in box.splitlines()[1:])
    return " ".join(takewhile(lambda line: line.strip("─╰╯-+"), lines)).rstrip(".") or box.strip()


def _help(program: str, commands: Mapping[str, Command], about: str) -> str:
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:{width}}  {command.help}" for name, command in commands.items())
    more = "; thinwire --version the version" if program == "thinwire" else ""
    last = f"{program} COMMAND --help shows a command's options{more}."
    return f"usage: {program} COMMAND [OPTIONS]\n\n{about}\n\ncommands:\n{listed}\n\n{last}"


def _fail(prog: str, message: str) -> int:
    print(f"{prog}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
