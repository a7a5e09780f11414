"""The `thinwire` command: a table of commands, each imported only when it is called.

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
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from .. import __doc__ as _PACKAGE_DOC
from .. import __version__


class Command(NamedTuple):
    """A command: the function to call, and its line in the help."""

    target: str
    """Function to call, as module:function within this package."""
    help: str


COMMANDS = {
    "train": Command("train.command:run", "train a model between ranks that send few bytes"),
    "plan": Command("plan:run", "predict what compression brings, from numbers or measured, and what to use"),
    "bench codec": Command("bench.codec:run", "time, bytes and memory of every compressor, and of plain torch"),
    "bench allreduce": Command(
        "bench.allreduce:run", "bytes and time of compressed all-reduces, measured and simulated"
    ),
    "bench link": Command("bench.link:run", "a training step over slow links, by torch's methods and thinwire's"),
    "bench results": Command("bench.results:run", "tables and a plot of what bench link or recipe measured"),
    "bench step": Command("bench.step:run", "time and memory of a training step, compared with torch's own"),
    "bench recipe": Command(
        "bench.recipe:run",
        "loss and bytes of training by different methods, dense and torch's hooks among them",
    ),
    "report": Command("report:run", "one HTML page of trainings: loss, accuracy, bytes and time"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"thinwire {__version__}")
        return 0
    words = _known_words(given)
    name, rest = " ".join(words), given[len(words) :]
    if name in COMMANDS:
        return _run(name, rest)
    if not rest or rest[0] in ("-h", "--help"):
        print(_help(name))
        return 0 if rest else 2
    kind = "option" if rest[0].startswith("-") else "command"
    return _fail(name, f"unknown {kind} {rest[0]!r}; try: {_prog(name)} --help")


def _run(name: str, arguments: list[str]) -> int:
    module, _, function = COMMANDS[name].target.partition(":")
    try:
        command = getattr(importlib.import_module(f".{module}", __package__), function)
        options = _parse(name, get_type_hints(command)["options"], arguments)
        return int(command(options))
    except (ValueError, OSError) as error:
        return _fail(name, str(error))
    except KeyboardInterrupt:
        return 130


def _parse(name: str, options: Any, arguments: list[str]) -> Any:
    import tyro  # imported here, because `thinwire --help` does not need it

    prog = _prog(name)
    given: dict[str, Any] = {"prog": prog, "args": arguments}
    if hasattr(options, "defaults"):  # these defaults depend on the arguments
        given["default"] = options.defaults(arguments)
    if {"-h", "--help"} & set(arguments):
        return tyro.cli(options, **given)
    # tyro draws a box around its errors. Drawn wide enough that no line breaks, its first paragraph is the message.
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "10000"
    drawn = io.StringIO()
    try:
        with contextlib.redirect_stderr(drawn):
            return tyro.cli(options, **given)
    except SystemExit as exit:
        if not exit.code:
            raise
        raise ValueError(f"{_first_paragraph(drawn.getvalue())}; try: {prog} --help") from None
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _first_paragraph(box: str) -> str:
    r"""Return the text of a drawn box between its title and the first rule, as one line.

    >>> _first_paragraph("╭─ Error ─╮\n│ bad     │\n│ option  │\n│ ─────── │\n│ help    │\n╰─────────╯")
    'bad option'
    """
    text: list[str] = []
    for line in box.splitlines()[1:]:
        content = line.strip("│| ")
        if not content.strip("─╰╯-+"):
            break
        text.append(content)
    return " ".join(text).rstrip(".") or box.strip()


def _known_words(given: list[str]) -> list[str]:
    """Return the longest prefix of the command line that is also a prefix of a command's name."""
    names = [name.split() for name in COMMANDS]
    return max((given[:n] for n in range(len(given) + 1) if any(name[:n] == given[:n] for name in names)), key=len)


def _help(group: str) -> str:
    width = max(map(len, COMMANDS))
    listed = [
        f"  {n:{width}}  {c.help}" for n, c in COMMANDS.items() if f"{n} ".startswith(f"{group} " if group else "")
    ]
    return "\n".join(
        [
            f"usage: {_prog(group)} COMMAND [OPTIONS]",
            *(["", (_PACKAGE_DOC or "").splitlines()[0]] if not group else []),
            "",
            "commands:",
            *listed,
            "",
            f"thinwire COMMAND --help shows a command's options{'' if group else '; thinwire --version the version'}.",
        ]
    )


def _prog(name: str) -> str:
    return f"thinwire {name}".strip()


def _fail(name: str, message: str) -> int:
    print(f"{_prog(name)}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
