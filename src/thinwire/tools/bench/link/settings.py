"""Checks the options before anything runs. Raises `ValueError` for options that cannot be run. Does not load torch."""

import importlib.util
import math
import re
from dataclasses import dataclass

from .lab import LARGEST
from .options import Options
from .relay import FASTEST

_UNITS = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
POWERSGD_PACKAGE = "powersgd package"
INSTALL_POWERSGD = "pip install git+https://github.com/epfml/powersgd.git"
"""Command that installs the package from its repository, because the package of this name on PyPI is empty."""
PEERS = (
    "no communication", "dense", "fp16 hook", "bf16", "powersgd rank 1", "powersgd rank 4", POWERSGD_PACKAGE,
)  # fmt: skip
MODES = ("attach", "thinwire.AdamW", "thinwire.SGD")
"""Ways of thinwire. A way is one of these followed by the spec of a compressor."""
OURS = (
    "attach quantize:bits=8",
    "attach topk:ratio=1/64,bits=2",
    "thinwire.AdamW topk:ratio=1/64,bits=2",
    "thinwire.AdamW default",
)
"""Ways of thinwire that are measured by default. With more ranks, the last one keeps less of each rank."""


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
        """Width of the layers, a multiple of 8."""
        per_square = 6 * 12 if self.kind == "gpt" else 8 * 9
        return max(8, 8 * round(math.sqrt(self.parameters / per_square) / 8))


@dataclass(frozen=True)
class Settings:
    """The checked options."""

    rates: dict[str, float]
    """Rates in bits per second, by the text that the user gave."""
    worlds: tuple[int, ...]
    ways: tuple[str, ...]
    left_out: tuple[str, ...]
    model: Model
    steps: int
    relay: bool


def settings(options: Options) -> Settings:
    """Return the checked options. Raises ValueError for options that cannot be run."""
    for name in ("rates", "worlds", "ways"):
        given = getattr(options, name)
        if not given or len(set(given)) < len(given):
            raise ValueError(f"--{name} {' '.join(map(str, given))}, expected one or more, each once")
    for world in options.worlds:
        if not 2 <= world <= LARGEST:
            raise ValueError(f"--worlds {world}, expected 2 to {LARGEST}")
    for name in ("batch", "steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}, expected 1 or more")
    if not 1e4 <= options.parameters <= 1e9:
        raise ValueError(f"--parameters {options.parameters:g}, expected 1e4 to 1e9")
    rates = {rate: parse_rate(rate) for rate in options.rates}
    for name, rate in rates.items():
        if options.relay and rate > FASTEST:
            raise ValueError(
                f"--relay --rates {name}, expected {FASTEST / 1e9:g}gbit or less: faster, and it is the relay that is "
                "measured"
            )
    for option, path in (("out", options.out), ("timeline", options.timeline)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"--{option} {path}, expected a file in a folder that is there")
    wanted, left_out = _ways(options)
    if options.timeline is not None and not any(way.partition(" ")[0] in MODES for way in wanted):
        raise ValueError(f"--timeline {options.timeline}, expected one of thinwire's --ways: others record nothing")
    model = Model(options.model, options.parameters, options.batch)
    return Settings(rates, options.worlds, wanted, left_out, model, options.steps, options.relay)


def _ways(options: Options) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ways to run, and the ways in "all" that cannot be run."""
    for way in options.ways:
        mode, _, spec = way.partition(" ")
        if way not in (*PEERS, "all") and not (mode in MODES and spec):
            raise ValueError(
                f"--ways {way!r}, expected all, or some of: {', '.join(PEERS)}, or one of {', '.join(MODES)} with a "
                f"compressor, such as {OURS[0]!r}"
            )
    given = [way for way in options.ways if way != "all"]
    wanted = (*PEERS, *OURS, *(way for way in given if way not in (*PEERS, *OURS))) if "all" in options.ways else given
    if importlib.util.find_spec("powersgd") is not None:
        return tuple(wanted), ()
    if POWERSGD_PACKAGE in given:
        raise ValueError(f"--ways {POWERSGD_PACKAGE!r}, which is not installed: {INSTALL_POWERSGD}")
    return tuple(way for way in wanted if way != POWERSGD_PACKAGE), tuple(w for w in wanted if w == POWERSGD_PACKAGE)


def parse_rate(text: str) -> float:
    """Return a rate in bits per second.

    >>> parse_rate("100mbit"), parse_rate("2.5gbit")
    (100000000.0, 2500000000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmg]?bit|)", text.strip().lower())
    if match is None or not 1e5 <= (rate := float(match[1]) * _UNITS[match[2]]) <= 1e12:
        raise ValueError(f"rate {text!r}, expected one from 100kbit to 1000gbit, such as 100mbit or 2.5gbit")
    return rate
