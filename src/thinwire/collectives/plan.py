"""Choose the algorithm and the number of segments from sizes alone, so that every rank makes the same choice."""

import os
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil

import torch

from ..compressors import Compressor, NoCompression, format_spec
from ..kernels.layout import DenseLayout, RandomKLayout, residual_dtype
from . import cost
from .cost import Cost, Span
from .transport.wire import AT_ONCE

ALGORITHMS = ("auto", "gather", "sharded", "dense", "values")

ENVIRONMENT_VARIABLE = "THINWIRE_MAX_BYTES"
DEFAULT_MAX_BYTES = 1 << 30
_SMALLEST_SEGMENT = 4096


@dataclass(frozen=True)
class Plan:
    """The plan for the reduction of one tensor."""

    algorithm: str  # gather, sharded, dense or values. With two stages, this is the algorithm between nodes.
    reason: str
    first: Compressor
    second: Compressor
    granule: int  # segments, and the shares of the ranks of a node, are cut at multiples of this number of elements
    segments: tuple[Span, ...]
    cost: Cost  # Cost of the whole operation. Its memory is that of the largest segment.


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
    """Return the algorithm and the reason; ValueError if it does not fit. "auto" shards only if it `can_shard`."""
    layout = first.layout(numel, dtype)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r}, expected one of {', '.join(ALGORITHMS)}")
    if algorithm == "values" and not layout.summable:
        reason = "whose ranks send different elements; 'values' works with randomk only"
        raise ValueError(f"algorithm 'values' with {format_spec(first)}, {reason}")
    if algorithm == "sharded" and isinstance(layout, RandomKLayout):
        raise ValueError(f"algorithm 'sharded' with {format_spec(first)}; use 'values', which sends less")
    if algorithm != "auto":
        return algorithm, "given by the caller"
    if isinstance(first, NoCompression):
        return "dense", "the compressor is none"
    if isinstance(layout, DenseLayout):
        return "dense", f"{format_spec(first)} would not be smaller for {numel} elements of {dtype}"
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
        why += "; not sharded, because no state was given for the residuals of the owners"
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
    """Return a plan with as few segments as possible, such that one operation fits its share of `max_bytes`.

    There are `ranks` in the compressed stage, and `ranks_in_node` in the dense one around it, unless that is 1. Raise
    ValueError if even the smallest segment does not fit.
    """
    if algorithm == "dense":
        first = second = cost.DENSE
    stage_dtype = dtype if ranks_in_node == 1 else residual_dtype(dtype)
    granule = max(1, first.layout(numel, stage_dtype).granule)
    if ranks_in_node > 1 and granule >= numel:
        granule = 1  # the tensor is one record, so the shares of a node's ranks may be cut anywhere

    stage = partial(cost.of, algorithm, first, second, ranks=ranks)

    def of(count: int) -> Cost:
        if ranks_in_node == 1:
            return stage(count, dtype)
        return cost.hierarchical(stage, granule=granule, numel=count, dtype=dtype, ranks_in_node=ranks_in_node)

    # Every segment has a record for each owner, so that the work is even.
    owners = ranks_in_node * (1 if algorithm in ("gather", "values") else ranks)
    unit = max(granule * owners, _SMALLEST_SEGMENT)
    rows = ceil(numel / unit)

    def memory(count: int) -> int:
        """Return the bytes that `AT_ONCE` operations need, each with the largest of `count` segments."""
        return AT_ONCE * of(min(numel, unit * ceil(rows / count))).memory

    most = max(1, rows)
    needed = memory(most)
    if needed > max_bytes:
        raise ValueError(
            f"max_bytes {max_bytes:,} cannot hold one segment of {algorithm} with {format_spec(first)} over "
            f"{ranks * ranks_in_node} ranks: raise max_bytes or {ENVIRONMENT_VARIABLE} by {needed - max_bytes:,} to "
            f"{needed:,} ({needed // AT_ONCE:,} bytes for each of {AT_ONCE} operations that may be under way)"
        )
    # The fewest segments that fit: with more of them, each takes less memory.
    count = 1 + bisect_left(range(1, most), True, key=lambda count: memory(count) <= max_bytes)
    peers = ranks + ranks_in_node - 2 if count > 1 else 0  # 8 bytes to each peer: a bound on the magnitudes, or NaN
    whole = of(numel)
    used = Cost(whole.sent + 8 * peers, whole.messages * count + peers, memory(count) // AT_ONCE)
    return Plan(algorithm, reason, first, second, granule, tuple(cost.shares(numel, unit, count)), used)


def max_bytes(given: int | None) -> int:
    """Return the memory budget: the argument, else the environment variable, else 1 GiB."""
    return given_max_bytes(given) or DEFAULT_MAX_BYTES


def given_max_bytes(given: int | None) -> int | None:
    """Return the memory budget from the argument or the environment variable, or None without either."""
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
