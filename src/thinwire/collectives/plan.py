"""Which algorithm, and in how many segments: decided from sizes alone, so that every rank decides alike."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil

import torch

from ..compressors import Compressor, NoCompression, format_spec
from ..kernels.layout import DenseLayout, RandomKLayout, residual_dtype
from . import cost
from .cost import Cost, Span

ALGORITHMS = ("auto", "gather", "sharded", "dense", "values")

ENVIRONMENT_VARIABLE = "THINWIRE_MAX_BYTES"
DEFAULT_MAX_BYTES = 1 << 30
_SMALLEST_SEGMENT = 4096
AT_ONCE = 4
"""Operations of one group under way at a time; the others wait their turn, so that memory is bounded."""


@dataclass(frozen=True)
class Plan:
    """How one tensor will be reduced."""

    algorithm: str
    """gather, sharded, dense or values; of the stage between nodes, if there are two."""
    reason: str
    first: Compressor
    second: Compressor
    granule: int
    """Segments, and the shares of a node's ranks, are cut at multiples of it."""
    segments: tuple[Span, ...]
    cost: Cost
    """Of the whole operation; its memory is that of the largest segment."""


@lru_cache(maxsize=1024)
def choose(
    algorithm: str,
    first: Compressor,
    second: Compressor,
    numel: int,
    dtype: torch.dtype,
    ranks: int,
    *,
    can_shard: bool,
) -> tuple[str, str]:
    """The algorithm to take, and why. `can_shard`: the owners have somewhere to keep what they do not send on."""
    layout = first.layout(numel, dtype)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r}, expected one of {', '.join(ALGORITHMS)}")
    if algorithm == "values" and not layout.summable:
        raise ValueError(
            f"algorithm 'values' with {format_spec(first)}, whose ranks keep different entries; only the values of "
            "randomk can be summed as they are"
        )
    if algorithm == "sharded" and isinstance(layout, RandomKLayout):
        raise ValueError(f"algorithm 'sharded' with {format_spec(first)}; use 'values', which sends less")
    if algorithm != "auto":
        return algorithm, "asked for"
    if isinstance(first, NoCompression):
        return "dense", "the compressor is none"
    if isinstance(layout, DenseLayout):
        return "dense", f"{format_spec(first)} would not be smaller for {numel} entries of {dtype}"
    if layout.summable:
        return "values", "all ranks keep the same positions, so their values are summed by a plain all-reduce"
    if ranks == 1:
        return "gather", "there is one rank"
    compared = ("gather", "sharded", "dense")
    sent = {name: cost.of(name, first, second, numel, dtype, ranks).sent for name in compared}
    why = "bytes sent per rank: " + ", ".join(f"{name} {round(nbytes):,}" for name, nbytes in sent.items())
    if numel <= layout.granule:
        del sent["sharded"]
        why += "; not sharded, because there is one record, which one rank would own"
    elif not can_shard:
        del sent["sharded"]
        why += "; not sharded, because no state was given to keep what owners do not send on"
    return min(sent, key=sent.__getitem__), why


@lru_cache(maxsize=1024)
def plan(
    algorithm: str,
    reason: str,
    first: Compressor,
    second: Compressor,
    numel: int,
    dtype: torch.dtype,
    ranks: int,
    ranks_in_node: int,
    max_bytes: int,
) -> Plan:
    """Cut the work into as few segments as keep one operation within its share of `max_bytes`.

    ranks           of the compressed stage.
    ranks_in_node   of the dense stage around it; 1: there is none.
    """
    if algorithm == "dense":
        first = second = cost.DENSE
    stage_dtype = dtype if ranks_in_node == 1 else residual_dtype(dtype)
    granule = max(1, first.layout(numel, stage_dtype).granule)
    if ranks_in_node > 1 and granule >= numel:
        granule = 1  # of one piece; so each rank of a node makes a piece of its own

    def between(entries: int, dtype: torch.dtype) -> Cost:
        return cost.of(algorithm, first, second, entries, dtype, ranks)

    def of(entries: int) -> Cost:
        if ranks_in_node == 1:
            return between(entries, dtype)
        return cost.hierarchical(between, granule, entries, dtype, ranks_in_node)

    # Every segment has a record for each owner, so that none carries more than the others.
    owners = ranks_in_node * (1 if algorithm in ("gather", "values") else ranks)
    unit = max(granule * owners, _SMALLEST_SEGMENT)
    rows = ceil(numel / unit)

    def largest(count: int) -> int:
        return min(numel, unit * ceil(rows / count)) if rows else 0

    limit = max_bytes // AT_ONCE
    if of(largest(max(1, rows))).memory > limit:
        needed = AT_ONCE * of(largest(max(1, rows))).memory
        raise ValueError(
            f"max_bytes {max_bytes:,} cannot hold one segment of {algorithm} with {format_spec(first)} over "
            f"{ranks * ranks_in_node} ranks: raise max_bytes or {ENVIRONMENT_VARIABLE} by {needed - max_bytes:,} to "
            f"{needed:,} ({needed // AT_ONCE:,} bytes for each of {AT_ONCE} operations that may be under way)"
        )
    count = _least(lambda count: of(largest(count)).memory <= limit, max(1, rows))
    bounds = [min(numel, unit * (rows * index // count)) for index in range(count + 1)]
    whole, segment = of(numel), of(largest(count))
    told = ranks + ranks_in_node - 2 if count > 1 else 0  # to each peer, 8 bytes: the largest number here, or NaN
    return Plan(
        algorithm,
        reason,
        first,
        second,
        granule,
        tuple(pairwise(bounds)),
        Cost(whole.sent + 8 * told, whole.messages * count + told, segment.memory),
    )


def max_bytes(given: int | None) -> int:
    """The memory budget: an argument, else the environment variable, else 1 GiB.

    >>> max_bytes(1 << 20)
    1048576
    """
    return given_max_bytes(given) or DEFAULT_MAX_BYTES


def given_max_bytes(given: int | None) -> int | None:
    """The memory budget that a user has given, as an argument or by the environment variable; None if neither."""
    if given is not None:
        if type(given) is not int or given <= 0:
            raise ValueError(f"max_bytes {given!r}, expected a whole number of bytes above 0")
        return given
    text = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if not text:
        return None
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(i?)B?", text, re.IGNORECASE)
    if not match or int(match[1]) == 0:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={text!r}, expected bytes above 0, such as 268435456, 256MiB or 1GiB")
    power = " KMG".index(match[2].upper() or " ")
    return int(match[1]) * int((1024 if match[3] else 1000) ** power)


def _least(fits: Callable[[int], bool], enough: int) -> int:
    """The least count from 1 to `enough` that fits, if larger counts fit too."""
    low, high = 0, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
