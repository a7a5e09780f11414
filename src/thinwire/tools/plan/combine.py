"""Combine the measurements of several ranks: take the median of each figure."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from .alone import Split, Steps, extras
from .costs import FP16_BYTE, MESSAGE, RING_BYTE, ROUND, SPREAD_BYTE, TRANSFER, Costs, Speeds


class Measured(NamedTuple):
    """Measurements of one rank without communication."""

    codecs: dict[str, Costs]
    halves: Costs
    steps: Steps


class Together(NamedTuple):
    """Combined measurements of all ranks."""

    speeds: Speeds
    nothing: Split
    """Seconds of a step without communication."""


def combine(answers: Sequence[Measured], entries: int, origin: str, crowd: float) -> Together:
    """Combine the measurements of all ranks.

    entries   number of elements of the model.
    origin    where the measurements were made, as text for the user.
    crowd     ranks per core, at least 1. The cost of handling bytes is multiplied by it.
    """
    first = answers[0]
    codecs = {spec: _middle([answer.codecs[spec] for answer in answers]) for spec in first.codecs}
    halves = _middle([answer.halves for answer in answers])
    nothing = Split(*(median(answer.steps.nothing[part] for answer in answers) for part in range(3)))
    more = {name: median(answer.steps.more[name] for answer in answers) for name in first.steps.more}
    found = extras(Steps(nothing, more), codecs, halves, entries)
    # `operation` is 0: the steps of a rank alone already include the cost of an exchange apart from its transfers.
    speeds = Speeds(
        origin, MappingProxyType(codecs), halves, 0.0, TRANSFER, MESSAGE, ROUND, RING_BYTE, FP16_BYTE, SPREAD_BYTE
    ).slower(crowd)  # fmt: skip
    measured = replace(speeds, codecs=MappingProxyType(codecs), halves=halves, extras=MappingProxyType(found))
    return Together(measured, nothing)


def _middle(costs: Sequence[Costs]) -> Costs:
    return Costs(*(median(getattr(one, name) for one in costs) for name in ("encode", "commit", "write", "add")))
