"""`thinwire bench link`: a training step over real links of a given rate, by torch's own ways and thinwire's.

Ranks are processes of this machine, each behind a link of its own: network namespaces joined by shaped links (`lab`),
made by root or in a user namespace, or a relay on the loopback interface (`relay`), which needs no rights. What a step
takes and what the links count is measured, nothing is computed. Time is the median of steps; bytes are those that a
rank has sent, as a mean over steps and ranks, in namespaces with the headers of TCP and Ethernet.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from thinwire.tools.bench.progress import Progress
from thinwire.tools.record import Writer, conditions

RATES = ("100mbit", "1gbit", "10gbit")


@dataclass(frozen=True)
class Options:
    """Time and bytes of a training step over slow links, beside every peer."""

    rates: Annotated[tuple[str, ...], arg(metavar="RATE ...")] = RATES
    """Of each rank's link, each way: a number of bits a second, with kbit, mbit or gbit."""
    worlds: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (2,)
    """Numbers of ranks, such as 2 4 8."""
    ways: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("all",)
    """all, or some, such as "fp16 hook" "thinwire.AdamW topk:ratio=1%" "attach auto"; --ways help lists them."""
    model: Literal["gpt", "cnn"] = "gpt"
    """Linear layers with the shapes of a GPT's, or convolutions."""
    parameters: float = 7.35e6
    """About so many."""
    batch: int = 32
    """Samples for each rank and step."""
    steps: int = 20
    """Timed steps, in rounds of 5; fewer where they are slow, down to 5. Three go before, in each round."""
    relay: bool = False
    """Links by a relay in place of network namespaces: for where neither root nor a user namespace can make these."""
    timeline: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write an HTML page: when rank 0 computed, compressed, exchanged and decoded in one step, for thinwire's ways."""
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write JSON lines to this file: the conditions, then a row for each rate, world and way."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> "Options":
        """A relay is too slow for the fastest rate."""
        return cls(rates=RATES[:2]) if "--relay" in arguments else cls()


def run(options: Options) -> int:
    """Measure and print the table; 1 if a way failed."""
    from .network import prepare
    from .settings import settings

    given = settings(options)
    if not given.relay:
        prepare()  # before torch is loaded: a process with threads cannot enter a user namespace
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns that addresses have no names there
    from thinwire.tools.workers import WorkerError

    from .command import command
    from .measured import measure_all
    from .table import print_rows
    from .timeline_page import page
    from .ways import way

    for name in given.ways:
        way(name)  # ValueError for a compressor that there is not
    rows = []
    said = command(options)
    links = "relay" if given.relay else "namespaces"
    kept = {**asdict(options), "out": None, "timeline": None}
    under = conditions(**{**kept, "links": links, "worker_threads": 1, "command": said})
    failed = False
    try:
        with ExitStack() as stack:
            writer = stack.enter_context(Writer(options.out))
            writer.write(under)
            progress = stack.enter_context(Progress(len(given.rates) * len(given.worlds) * len(given.ways)))
            for row in measure_all(given, progress, timelines=options.timeline is not None):
                writer.write(row.record())
                rows.append(row)
    except WorkerError as error:
        print(f"thinwire bench link: FAILED, {error}", file=sys.stderr)
        failed = True
    print("thinwire {thinwire}, torch {torch}, {cpu}, {cores} cores, {date}".format(**under))
    print_rows(given, rows)
    if options.timeline is not None:
        options.timeline.write_text(page(rows, under, said), encoding="utf-8")
        print(f"{options.timeline}: open it in a browser")
    return int(failed)
