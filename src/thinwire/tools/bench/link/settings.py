"""The options of `thinwire bench link`, and their checks before anything runs. Does not load torch."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from thinwire.tools.links.relay import FASTEST
from thinwire.tools.units import LinkSpeed, parse_link

from ..harness import File, Names, Numbers, arg, at_least, check_file, check_world
from ..methods import BY_LINK, BY_ROUND_TRIP, INSTALL_POWERSGD, POWERSGD_PACKAGE, Method, parse

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

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> "Options":
        """Return the defaults. With --relay they leave out the highest rate, for which a relay is too slow."""
        return cls(rates=RATES[:2]) if {"--relay", "--relay=True"} & set(arguments) else cls()


@dataclass(frozen=True)
class Model:
    """A model of a given size.

    kind         gpt: the linear layers of 6 GPT blocks; cnn: 8 convolutions on 16 x 16 images.
    parameters   approximate number of parameters.
    batch_size   samples for each rank and step.
    """

    kind: str
    parameters: float
    batch_size: int

    @property
    def width(self) -> int:
        """Return the width of the layers, a multiple of 8."""
        per_square = 6 * 12 if self.kind == "gpt" else 8 * 9
        return max(8, 8 * round(math.sqrt(self.parameters / per_square) / 8))


@dataclass(frozen=True)
class Settings:
    """The checked options."""

    rates: dict[str, LinkSpeed]
    """Rates and round-trip times of links, by the text that the user gave."""
    worlds: tuple[int, ...]
    methods: tuple[Method, ...]
    left_out: tuple[str, ...]
    """Methods in "all" that cannot be run."""
    model: Model
    steps: int
    relay: bool


def settings(options: Options) -> Settings:
    """Return the checked options. Raises ValueError for options that cannot be run."""
    for name in ("rates", "worlds", "methods"):
        given = getattr(options, name)
        if not given or len(set(given)) < len(given):
            raise ValueError(f"--{name} {' '.join(map(str, given))}, expected one or more, each once")
    for world in options.worlds:
        check_world("worlds", world)
    at_least(options, batch=1, steps=1)
    if not 1e4 <= options.parameters <= 1e9:
        raise ValueError(f"--parameters {options.parameters:g}, expected 1e4 to 1e9")
    rates = {text: parse_link(text) for text in options.rates}
    for name, speed in rates.items():
        if options.relay and speed.rate > FASTEST:
            raise ValueError(
                f"--relay --rates {name}, expected {FASTEST / 1e9:g}gbit or less: at higher rates the relay "
                "is measured, not the link"
            )
    for option, path in (("out", options.out), ("timeline", options.timeline)):
        check_file(option, path)
    methods, left_out = _methods(options.methods, any(speed.round_trip for speed in rates.values()))
    if options.timeline is not None and not any(method.is_ours and not method.is_local for method in methods):
        raise ValueError(f"--timeline {options.timeline}, expected one of thinwire's --methods: others record nothing")
    model = Model(options.model, options.parameters, options.batch)
    return Settings(
        rates=rates,
        worlds=options.worlds,
        methods=methods,
        left_out=left_out,
        model=model,
        steps=options.steps,
        relay=options.relay,
    )


def _methods(texts: tuple[str, ...], has_round_trip: bool) -> tuple[tuple[Method, ...], tuple[str, ...]]:
    """Return the methods to run, and those in "all" that cannot be run."""
    given = [text for text in texts if text != "all"]
    every = (*BY_LINK, *(BY_ROUND_TRIP if has_round_trip else ()))
    wanted = list(dict.fromkeys([*(every if "all" in texts else ()), *given]))
    left_out: tuple[str, ...] = ()
    if POWERSGD_PACKAGE in wanted and importlib.util.find_spec("powersgd") is None:
        if POWERSGD_PACKAGE in given:
            raise ValueError(f"--methods {POWERSGD_PACKAGE!r}, which is not installed: {INSTALL_POWERSGD}")
        wanted.remove(POWERSGD_PACKAGE)
        left_out = (POWERSGD_PACKAGE,)
    return tuple(parse(text) for text in wanted), left_out
