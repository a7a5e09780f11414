"""The options of `thinwire bench link`, and their checks before anything runs. Does not load torch."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from thinwire.tools.links.relay import FASTEST
from thinwire.tools.units import LinkSpeed, parse_link

from ..harness import File, Names, Numbers, arg, at_least, check_file, check_world
from ..methods import BY_LINK, BY_ROUND_TRIP, COMPRESSING, INSTALL_POWERSGD, POWERSGD_PACKAGE, Method, parse

RATES = ("100mbit", "1gbit", "10gbit")


@dataclass(frozen=True)
class Options:
    """Time and bytes of a training step over slow links, by torch's methods and thinwire's."""

    rates: Annotated[tuple[str, ...], arg(metavar="RATE[,TIME] ...")] = RATES
    """Bandwidth of each rank's link, in each direction: a number of bits per second, with kbit, mbit or gbit. Behind a
    comma its round-trip time, such as 100mbit,100ms."""
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
    """Links by a relay in place of network namespaces: for where neither root nor a user namespace can make these."""
    timeline: File = None
    """Write a Chrome trace of one step of rank 0, for each of thinwire's methods; Perfetto opens it."""
    out: File = None
    """Write JSON lines to this file: the conditions, then a row for each rate, world and method."""

    @property
    def speeds(self) -> dict[str, LinkSpeed]:
        """Return rates and round-trip times of links, by the text that the user gave."""
        return {text: parse_link(text) for text in self.rates}

    @property
    def size(self) -> "Model":
        """Return the model to build."""
        return Model(self.model, self.parameters, self.batch)

    @property
    def chosen(self) -> list[Method]:
        """Return the methods to run; those of "all" that cannot be run are not among them."""
        every = (*BY_LINK, *(BY_ROUND_TRIP if any(speed.round_trip for speed in self.speeds.values()) else ()))
        texts = [text for given in self.methods for text in (every if given == "all" else (given,))]
        return [parse(text) for text in dict.fromkeys(texts) if text != POWERSGD_PACKAGE or has_powersgd_package()]

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> "Options":
        """Return the defaults. With --relay they leave out the highest rate, for which a relay is too slow."""
        return cls(rates=RATES[:2]) if {"--relay", "--relay=True"} & set(arguments) else cls()


class Model(NamedTuple):
    """A model of a given size."""

    kind: str
    """gpt: the linear layers of 6 GPT blocks; cnn: 8 convolutions on 16 x 16 images."""
    parameters: float
    """Approximate number of parameters."""
    batch_size: int
    """Samples for each rank and step."""

    @property
    def width(self) -> int:
        """Return the width of the layers, a multiple of 8."""
        per_square = 6 * 12 if self.kind == "gpt" else 8 * 9
        return max(8, 8 * round(math.sqrt(self.parameters / per_square) / 8))


def check(options: Options) -> None:
    """Raise ValueError for options that cannot be run."""
    for name in ("rates", "worlds", "methods"):
        given = getattr(options, name)
        if not given or len(set(given)) < len(given):
            raise ValueError(f"--{name} {' '.join(map(str, given))}, expected one or more, each once")
    for world in options.worlds:
        check_world("worlds", world)
    at_least(options, batch=1, steps=1)
    if not 1e4 <= options.parameters <= 1e9:
        raise ValueError(f"--parameters {options.parameters:g}, expected 1e4 to 1e9")
    for name, speed in options.speeds.items():
        if options.relay and speed.rate > FASTEST:
            raise ValueError(
                f"--relay --rates {name}, expected {FASTEST / 1e9:g}gbit or less: at higher rates the relay "
                "is measured, not the link"
            )
    check_file("out", options.out)
    check_file("timeline", options.timeline)
    if POWERSGD_PACKAGE in options.methods and not has_powersgd_package():
        raise ValueError(f"--methods {POWERSGD_PACKAGE!r}, which is not installed: {INSTALL_POWERSGD}")
    if not any(method.name in COMPRESSING for method in options.chosen) and options.timeline is not None:
        raise ValueError(f"--timeline {options.timeline}, expected one of thinwire's --methods: others record nothing")


def has_powersgd_package() -> bool:
    """Return whether the package of PowerSGD's authors is installed."""
    return importlib.util.find_spec("powersgd") is not None
