"""`python -m benchmarks link`: a training step over real links of a given rate, by torch's methods and thinwire's.

Ranks are processes of this machine, each behind its own link. The links are network namespaces joined by shaped
interfaces (`namespaces`), which root can create, or a relay on the loopback interface (`thinwire.tools.links.relay`),
which needs no rights. Step times and bytes are measured and not computed. The time is
the median over steps; with local steps, of which one in several exchanges, it is the mean over whole rounds. The bytes
are those sent by a rank, as the mean over steps and ranks. In namespaces they include the headers of TCP and Ethernet.
"""

import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from thinwire.tools.links.relay import FASTEST
from thinwire.tools.units import LinkSpeed, parse_link

from . import results_link
from .harness import File, Line, Names, Numbers, Row, arg, at_least, check_file, check_world
from .harness import run as run_benchmark
from .methods import BY_LINK, BY_ROUND_TRIP, Method, parse
from .namespaces import why_not

RATES = ("100mbit", "1gbit", "10gbit")


@dataclass(frozen=True)
class Options:
    """Time and bytes of a training step over slow links, by torch's methods and thinwire's."""

    rates: Annotated[tuple[str, ...], arg(metavar="RATE[,TIME] ...", help_behavior_hint="")] = ()
    """Bandwidth of each rank's link, in each direction: a number of bits per second, with kbit, mbit or gbit. Behind a
    comma, with --relay, its round-trip time, such as 100mbit,100ms. Default: 100mbit 1gbit, and without --relay
    10gbit."""
    worlds: Numbers = (2,)
    """Numbers of ranks, such as 2 4 8."""
    methods: Names = ("all",)
    """all, or some, such as "fp16 hook" "thinwire.AdamW topk:ratio=1%" "attach auto"; --methods help lists them."""
    model: Literal["gpt", "cnn"] = "gpt"
    """Linear layers with the shapes of a GPT's, or convolutions."""
    parameters: float = 7.35e6
    """Approximate number of parameters."""
    batch: int = 32
    """Samples for each rank and step."""
    steps: int = 20
    """Timed steps, in rounds of 5; fewer where they are slow, down to 5. Each round starts with three untimed steps."""
    relay: bool = False
    """Links by a relay in place of network namespaces: for who is not root, and for round-trip times."""
    out: File = None
    """Write JSON lines to this file: the conditions, then a row for each rate, world and method."""

    @property
    def speeds(self) -> dict[str, LinkSpeed]:
        """Return rates and round-trip times of links, by their texts."""
        return {text: parse_link(text) for text in self.rates or RATES[: 2 if self.relay else 3]}

    @property
    def chosen(self) -> list[Method]:
        every = (*BY_LINK, *(BY_ROUND_TRIP if any(speed.round_trip for speed in self.speeds.values()) else ()))
        texts = [text for given in self.methods for text in (every if given == "all" else (given,))]
        return [parse(text) for text in dict.fromkeys(texts)]


def check(options: Options) -> None:
    """Raise ValueError for options that cannot be run."""
    for name in ("rates", "worlds", "methods"):
        given = getattr(options, name)
        if len(set(given)) < len(given) or not (given or name == "rates"):
            raise ValueError(f"--{name} {' '.join(map(str, given))}, expected one or more, each once")
    for world in options.worlds:
        check_world("worlds", world)
    at_least(batch=(options.batch, 1), steps=(options.steps, 1))
    if not 1e4 <= options.parameters <= 1e9:
        raise ValueError(f"--parameters {options.parameters:g}, expected 1e4 to 1e9")
    for name, speed in options.speeds.items():
        if options.relay and speed.rate > FASTEST:
            raise ValueError(
                f"--relay --rates {name}, expected {FASTEST / 1e9:g}gbit or less: at higher rates the relay "
                "is measured, not the link"
            )
        if not options.relay and speed.round_trip:
            raise ValueError(f"--rates {name} without --relay, expected rates alone: only a relay delays what is sent")
    check_file("out", options.out)
    _ = options.chosen  # raises ValueError for an unknown method


def run(options: Options) -> int:
    """Measure and print the table. Return 0, or 1 if a method failed."""
    check(options)
    if not options.relay:
        reason = why_not()
        if reason is not None:
            raise ValueError(
                f"no links by network namespaces: {reason}; --relay needs no rights and no tools: ranks on the "
                "loopback interface, through a relay that holds their bytes back"
            )
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch warns that addresses have no host names
    from . import training
    from .link_steps import measure

    for method in options.chosen:
        training.check(method.text)  # raises ValueError for an unknown compressor
    under = {**asdict(options), "rates": list(options.speeds), "links": "relay" if options.relay else "namespaces"}
    del under["out"]
    measured, steps = partial(measure, options), len(options.speeds) * len(options.worlds) * len(options.chosen)
    return run_benchmark(options, measured, _show, name="link", progress_steps=steps, worker_threads=1, **under)


def _show(rows: list[Row], under: Line) -> None:
    """Print a table for each world size."""
    for worlds in results_link.group({Path(): [{**row, "conditions": under} for row in rows]}):
        for world in worlds:
            print(f"\n{world.ranks} ranks, {under['model']}, milliseconds of a step\n\n{results_link.table(world)}")
    print(
        "\nMedians; with local steps means over whole rounds. In brackets: speed-up over dense.\n"
        "MB/step: at the slowest rate; over faster links packets have fewer headers. reduction: of bytes."
    )
    print(f"Links: {results_link.LINKS[under['links']]}.")
    if any("," in row["rate"] for row in rows):
        print("Round-trip times, behind the comma: the relay delivers each byte half of it after it was sent.")
