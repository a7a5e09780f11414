"""`thinwire bench link`: a training step over real links of a given rate, by torch's own ways and thinwire's.

Ranks are processes in network namespaces of this machine, whose links are shaped (`lab.py`): what a step takes and what
the interface counts are measured, nothing is computed. Time is the median of steps, bytes are those that the interface
of a rank has sent, headers included, as a mean over steps and ranks.
"""

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from thinwire.bench.progress import Progress
from thinwire.record import Writer, conditions


@dataclass(frozen=True)
class Options:
    """Time and bytes of a training step over slow links, beside every peer. Needs root, for network namespaces."""

    rates: Annotated[tuple[str, ...], arg(metavar="RATE ...")] = ("100mbit", "1gbit", "10gbit")
    """Of each rank's link, each way: a number of bits a second, with kbit, mbit or gbit."""
    worlds: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (2,)
    """Numbers of ranks, such as 2 4 8."""
    ways: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("all",)
    """all, or some; thinwire bench link --ways help lists them."""
    model: Literal["gpt", "cnn"] = "gpt"
    """Linear layers with the shapes of a GPT's, or convolutions."""
    parameters: float = 7.35e6
    """About so many."""
    batch: int = 32
    """Samples for each rank and step."""
    steps: int = 20
    """Timed steps; fewer where they are slow, but at least 5. Three go before."""
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write JSON lines to this file: the conditions, then a row for each rate, world and way."""


def run(options: Options) -> int:
    """Measure and print the table; 1 if a way failed."""
    from thinwire.workers import WorkerError

    from .measured import measure_all
    from .settings import settings
    from .table import print_rows

    given = settings(options)
    rows = []
    under = conditions(**{**asdict(options), "out": None, "rates": list(given.rates), "worker_threads": 1})
    failed = False
    try:
        with ExitStack() as stack:
            writer = stack.enter_context(Writer(options.out))
            writer.write(under)
            progress = stack.enter_context(Progress(len(given.rates) * len(given.worlds) * len(given.ways)))
            for row in measure_all(given, progress):
                writer.write(row.record())
                rows.append(row)
    except WorkerError as error:
        print(f"thinwire bench link: FAILED, {error}", file=sys.stderr)
        failed = True
    print("thinwire {thinwire}, torch {torch}, {cpu}, {cores} cores, {date}".format(**under))
    print_rows(given, rows)
    return int(failed)
