"""`python -m benchmarks`, a table of commands, each imported only when it is called."""

import sys
from collections.abc import Sequence

from thinwire.tools.cli import Command, run_command

PROGRAM = "python -m benchmarks"
COMMANDS = {
    "codec": Command("benchmarks.codec:run", "time, bytes and memory of every compressor, and of plain torch"),
    "link": Command("benchmarks.link:run", "a training step over slow links, by torch's methods and thinwire's"),
    "recipe": Command("benchmarks.recipe:run", "loss and bytes of training by different methods, torch's among them"),
    "results": Command("benchmarks.results:run", "tables and a plot of what link or recipe measured"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(PROGRAM, COMMANDS, given, about="Benchmarks of thinwire and its alternatives.")


if __name__ == "__main__":
    sys.exit(main())
