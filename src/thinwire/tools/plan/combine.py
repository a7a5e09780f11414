"""What several ranks measured of themselves, as one: the median of each figure."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from .alone import Split, Steps, extras
from .costs import FP16_BYTE, MESSAGE, RING_BYTE, ROUND, SPREAD_BYTE, TRANSFER, Costs, Speeds


class Measured(NamedTuple):
    """By one rank alone."""

    codecs: dict[str, Costs]
    halves: Costs
    steps: Steps


class Together(NamedTuple):
    speeds: Speeds
    nothing: Split
    """A step without communication."""


def combine(answers: Sequence[Measured], entries: int, origin: str, crowd: float) -> Together:
    """
    entries   of the model.
    crowd     ranks for each core, at least 1: what handling bytes costs is longer by it.
    """
    first = answers[0]
    codecs = {spec: _middle([answer.codecs[spec] for answer in answers]) for spec in first.codecs}
    halves = _middle([answer.halves for answer in answers])
    nothing = Split(*(median(answer.steps.nothing[part] for answer in answers) for part in range(3)))
    more = {name: median(answer.steps.more[name] for answer in answers) for name in first.steps.more}
    found = extras(Steps(nothing, more), codecs, halves, entries)
    # What an exchange costs apart from its transfers is in the steps of a rank alone.
    speeds = Speeds(
        origin, MappingProxyType(codecs), halves, 0.0, TRANSFER, MESSAGE, ROUND, RING_BYTE, FP16_BYTE, SPREAD_BYTE
    ).slower(crowd)  # fmt: skip
    measured = replace(speeds, codecs=MappingProxyType(codecs), halves=halves, extras=MappingProxyType(found))
    return Together(measured, nothing)


def _middle(costs: Sequence[Costs]) -> Costs:
    return Costs(*(median(getattr(one, name) for one in costs) for name in ("encode", "commit", "write", "add")))
