"""The options, checked: `ValueError` for what cannot be run, before anything runs."""

import importlib.util
import re
from dataclasses import dataclass

from . import Options
from .lab import LARGEST, why_not
from .models import Model
from .ways import WAYS

_UNITS = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Settings:
    rates: dict[str, float]
    """As they were given, and in bits a second."""
    worlds: tuple[int, ...]
    ways: tuple[str, ...]
    left_out: tuple[str, ...]
    model: Model
    steps: int


def settings(options: Options) -> Settings:
    reason = why_not()
    if reason is not None:
        raise ValueError(f"no links can be made here: {reason}")
    unknown = [way for way in options.ways if way not in (*WAYS, "all")]
    if unknown or not options.ways:
        raise ValueError(f"--ways {' '.join(unknown)}, expected all, or some of: {', '.join(WAYS)}")
    wanted = tuple(WAYS) if "all" in options.ways else options.ways
    there = importlib.util.find_spec("powersgd") is not None
    left_out = tuple(way for way in wanted if way == "powersgd package" and not there)
    for world in options.worlds:
        if not 2 <= world <= LARGEST:
            raise ValueError(f"--worlds {world}, expected 2 to {LARGEST}")
    for name in ("batch", "steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}, expected 1 or more")
    if not 1e4 <= options.parameters <= 1e9:
        raise ValueError(f"--parameters {options.parameters:g}, expected 1e4 to 1e9")
    return Settings(
        {rate: parse_rate(rate) for rate in options.rates},
        options.worlds,
        tuple(way for way in wanted if way not in left_out),
        left_out,
        Model(options.model, options.parameters, options.batch),
        options.steps,
    )


def parse_rate(text: str) -> float:
    """Bits a second.

    >>> parse_rate("100mbit"), parse_rate("2.5gbit")
    (100000000.0, 2500000000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmg]?bit|)", text.strip().lower())
    if match is None or not 1e5 <= (rate := float(match[1]) * _UNITS[match[2]]) <= 1e12:
        raise ValueError(f"rate {text!r}, expected one from 100kbit to 1000gbit, such as 100mbit or 2.5gbit")
    return rate
