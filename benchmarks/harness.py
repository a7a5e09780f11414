"""What all benchmarks share: options, rows, progress, tables, and from options to an exit code.

A benchmark yields rows. A row is a dict that becomes one line of JSON, behind a line of the conditions under which it
was measured. Tables are made from the same dicts. A row may have a "fault", the description of something wrong.

Importing this needs neither torch nor the packages of the command line. Benchmarks run where there is torch alone.
"""

import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from thinwire.tools.links import LARGEST_WORLD
from thinwire.tools.record import Line as Line
from thinwire.tools.record import Writer, conditions, read_lines

if TYPE_CHECKING:
    from tyro.conf import arg as arg
else:
    try:
        from tyro.conf import arg
    except ImportError:  # no command line is parsed there

        def arg(**_: object) -> None:
            """Stand in for tyro's annotation."""


File = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")]
"""Type of an option that names a file to write."""
Specs = Annotated[tuple[str, ...], arg(metavar="SPEC ...", help_behavior_hint="")]
Names = Annotated[tuple[str, ...], arg(metavar="NAME ...")]
Numbers = Annotated[tuple[int, ...], arg(metavar="INT ...")]
Model = Annotated[str, arg(metavar="SPEC")]

Row = dict[str, Any]


class Failure(Exception):
    """A benchmark found a wrong result and stops."""


class Progress:
    """Prints a line on stderr for each finished step."""

    def __init__(self, steps: int) -> None:
        self._steps, self._finished = steps, 0

    def finish(self, title: str, summary: str) -> None:
        """Count a step as finished, and print its title and summary."""
        self._finished += 1
        print(f"[{self._finished}/{self._steps}] {title}: {summary}", file=sys.stderr, flush=True)


def run(
    options: Any, measure: Callable[[Progress], Iterator[Row]], show: Callable[[list[Row], Line], None], *, name: str,
    progress_steps: int, **under: object,
) -> int:  # fmt: skip
    """Measure, write and print the rows of a benchmark. Return 0, or 1 if a rank failed or a row has a fault.

    `progress_steps` is the number of steps that the progress counts, `under` are conditions besides those of the
    machine. If the benchmark fails, what was measured until then is written and printed.
    """
    from thinwire.testing.pool import RankError  # loads torch; --help and errors in options do not wait for that

    check_file("out", options.out)
    line, rows, faults = conditions(**under, command=command_line(name, options)), list[Row](), list[str]()
    with Writer(options.out) as writer:
        writer.write(line)
        try:
            for row in measure(Progress(progress_steps)):
                writer.write(row)
                rows.append(row)
        except (Failure, RankError) as error:
            faults.append(str(error))
    if rows:
        print("thinwire {thinwire}, torch {torch}, {cpu}, {cores} cores, kernels {kernels}, {date}".format(**line))
        show(rows, line)
    faults += [row["fault"] for row in rows if row.get("fault")]
    for fault in faults:
        print(f"python -m benchmarks {name}: FAILED, {fault}", file=sys.stderr)
    return int(bool(faults))


def read(path: str | Path) -> Iterator[Line]:
    """Yield every row of a file, with its conditions under that name. Raises ValueError if it has none before it."""
    current: Line | None = None
    for number, line in read_lines(path):
        if line["kind"] == "conditions":
            current = line
        elif current is None:
            raise ValueError(f"{path}:{number}: a line of kind {line['kind']!r:.80} before any conditions")
        else:
            yield {**line, "conditions": current}


def print_table(title: str, rows: Sequence[Mapping[str, str]], *, text: Collection[str] = ()) -> None:
    """Print a table whose headers are the keys of all rows. Columns of `text` are left-aligned."""
    widths = {header: max(len(header), *(len(row[header]) for row in rows)) for header in rows[0]}

    def line(cells: Mapping[str, str]) -> str:
        aligned = (f"{cells[name]:{'<' if name in text else '>'}{width}}" for name, width in widths.items())
        return "  ".join(aligned).rstrip()

    heading = line({header: header for header in widths})
    print("\n".join(["", title, heading, "-" * (sum(widths.values()) + 2 * len(widths) - 2), *map(line, rows)]))


def short(value: float | None, digits: int = 3) -> str:
    """Format a number with about so many digits and no exponent, and None as an empty text.

    >>> short(1234.5), short(12.345), short(1.2345), short(0.012345), short(2507.4, 2), short(7.312, 2), short(None)
    ('1,234', '12.3', '1.23', '0.012', '2,507', '7.3', '')
    """
    if value is None:
        return ""
    whole = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    return f"{value:,.{max(0, digits - whole)}f}"


def at_least(**given: tuple[int, int]) -> None:
    """Raise ValueError if the value of an option is lower than the number behind it."""
    for name, (value, least) in given.items():
        if value < least:
            raise ValueError(f"--{name} {value}, expected {least} or more")


def check_world(option: str, ranks: int) -> None:
    """Raise ValueError if an option asks for too few or too many ranks."""
    if not 2 <= ranks <= LARGEST_WORLD:
        raise ValueError(f"--{option} {ranks}, expected 2 to {LARGEST_WORLD} ranks")


def check_file(option: str, path: Path | None) -> None:
    """Raise ValueError if an option names something that cannot be written as a file."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"--{option} {path}, expected a file in an existing folder")


def command_line(name: str, options: Any) -> str:
    """Return the command line with all options that differ from the defaults, to record it with the results."""
    words = ["python", "-m", "benchmarks", name]
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            listed = value if isinstance(value, tuple) else [] if value is True else [value]
            option = [] if field.name == "files" else [f"--{field.name.replace('_', '-')}"]
            words += [*option, *map(_word, listed)]
    return shlex.join(words)


def _word(value: object) -> str:
    """Return a value as an argument of the command line.

    >>> _word(7.35e6), _word(2)
    ('7.35e6', '2')
    """
    return re.sub(r"e\+0*", "e", f"{value:g}") if isinstance(value, float) else str(value)
