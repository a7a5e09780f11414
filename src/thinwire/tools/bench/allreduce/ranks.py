"""Measures all-reduces between processes of this machine: bytes against their formula, and the time of the parts.

**Bytes** are counted by the report of the operation and on the loopback interface, which also counts what gloo and TCP
add. A gloo message is a notice from each side and the data, each with 48 bytes in front of it, in at least four packets
with 52 bytes of headers each, plus acknowledgements: 350 to 650 bytes in total. Other traffic and packets that are sent
twice can only add to a count, so each covers one operation between two moments without traffic, and the lowest of
several is used. If the interface is never quiet, there is no count.

**Times** run from the moment the first rank leaves a barrier until the last rank is done. They are taken from the clock
that all processes of a machine share, and the time of the barrier alone is subtracted. The parts are the calls that a
program could make by itself: compress with a residual, torch's all-gather of the payloads, and the sum of all payloads.
Ranks have one thread each. If there are more ranks than cores, all times include waiting for a core.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from thinwire.collectives import Report, ShardState, all_reduce_compressed
from thinwire.collectives.cost import Cost
from thinwire.collectives.plan import Plan, choose, plan
from thinwire.compressors import Compressor
from thinwire.kernels.layout import RandomKLayout
from thinwire.tools import loopback
from thinwire.tools.workers import Workers

from ..harness import Progress, Row
from ..measure import timing

VALUES_SPEC = "randomk:ratio=1/64"
"""Compressor that is counted in addition to the requested one.

The algorithm `values` needs a compressor that draws the same positions on all ranks.
"""
LIMIT = 0.02
"""Largest relative difference between a count and the formula."""
FRAMING_LIMIT = 700
"""Bytes that gloo and TCP may add to a message.

Messages of many packets have more, but that stays within `LIMIT`.
"""
COUNTS = 5
"""Number of counts of an operation, of which the lowest is used."""
PATIENCE_SECONDS = 5.0
"""Longest time spent on the counts of an operation.

More than `COUNTS` counts are taken while all are too high, because other traffic may be on the interface.
"""
UNBOUNDED = 1 << 62
"""Memory, in bytes, with which no operation is cut into segments."""
PARTS = ("compress", "all_gather of payloads", "decompress")
WHOLE, BARRIER = "gather", "barrier"
_SHIFTS, _STRIDE = 4, 1088  # in elements; keeps every gradient aligned to 128 bytes

Span = tuple[float, float]
"""Start and end of a job on a rank, in seconds."""


class Case(NamedTuple):
    """A compressor and an algorithm for a float32 tensor and a world size, whose bytes are counted."""

    world: int
    spec: str
    algorithm: str
    """The requested algorithm, which may be "auto"."""
    numel: int
    chosen: str
    """The algorithm that runs."""
    cost: Cost
    """Cost of the chosen algorithm, from its formula."""

    def __str__(self) -> str:
        return f"{self.world} ranks, {self.spec}, {self.algorithm}"


def cases(spec: str, numel: int, world: int) -> list[Case]:
    """Return a case for each algorithm that the compressor supports, at one world size.

    If the ranks of the compressor keep different positions, the cases of `VALUES_SPEC` are added.
    """

    def case(spec: str, algorithm: str) -> Case:
        made = planned(spec, algorithm, numel=numel, ranks=world)
        return Case(world=world, spec=spec, algorithm=algorithm, numel=numel, chosen=made.algorithm, cost=made.cost)

    flat_algorithm = flat(thinwire.compressor(spec), numel)
    found = [case(spec, algorithm) for algorithm in ("gather", flat_algorithm, "dense", "auto")]
    if flat_algorithm != "values" and flat(thinwire.compressor(VALUES_SPEC), numel) == "values":
        found += [case(VALUES_SPEC, algorithm) for algorithm in ("values", "auto")]
    return found


def planned(
    spec: str, algorithm: str, *, numel: int, ranks: int, ranks_in_node: int = 1, max_bytes: int = UNBOUNDED
) -> Plan:
    """Return the plan of an operation on a float32 tensor: by default in one stage, and in one segment.

    ranks   number of ranks in the compressed stage.

    Raises ValueError if not even a segment fits into `max_bytes`.
    """
    first, dtype, share = thinwire.compressor(spec), torch.float32, -(-numel // ranks_in_node)
    second = first.for_sum(ranks)
    chosen, reason = choose(
        algorithm, first=first, second=second, numel=share, dtype=dtype, ranks=ranks, can_shard=True
    )
    return plan(
        chosen,
        reason=reason,
        first=first,
        second=second,
        numel=numel,
        dtype=dtype,
        ranks=ranks,
        ranks_in_node=ranks_in_node,
        max_bytes=max_bytes,
    )


def flat(compressor: Compressor, numel: int) -> str:
    """Return the algorithm for this compressor whose bytes do not grow with the world size."""
    return "values" if isinstance(compressor.layout(numel, torch.float32), RandomKLayout) else "sharded"


class Reducer:
    """Runs on each rank and repeats the operation whose bytes are counted."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank

    def set_case(self, case: Case) -> None:
        """Set the operation that `reduce` runs, and run it once, so that all ranks are connected and agree on it."""
        self._algorithm = case.algorithm
        self._compressor = thinwire.compressor(case.spec)
        self._gradient = torch.randn(case.numel, generator=torch.Generator().manual_seed(self._rank))
        self._tensor = torch.empty_like(self._gradient)
        self._residual, self._state = torch.zeros_like(self._gradient), ShardState()
        self.reduce()

    def reduce(self) -> Report:
        """Run the operation on a copy of the gradient and return its report."""
        self._tensor.copy_(self._gradient)
        return all_reduce_compressed(
            self._tensor, self._compressor, self._residual, algorithm=self._algorithm, state=self._state
        ).report


def count_bytes(given: Sequence[Case], workers: Workers, progress: Progress) -> Iterator[Row]:
    """Count the bytes of every case and yield a row for each."""
    for world, group in groupby(given, lambda case: case.world):
        workers.form(world, Reducer)
        for case in group:
            progress.start(str(case))
            row = _count(case, workers)
            progress.finish(f"{row['reported_bytes']:,.0f} bytes sent per rank, formula {case.cost.sent:,.0f}")
            yield row


def _count(case: Case, workers: Workers) -> Row:
    workers.ask("set_case", case)
    counts: list[int] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        quiet_before, before = loopback.wait_until_quiet()
        reports: list[Report] = workers.ask("reduce")
        quiet_after, after = loopback.wait_until_quiet()
        if quiet_before and quiet_after:
            counts.append(after - before)
        assert all(report.algorithm == case.chosen for report in reports), f"{case}: {reports[0].algorithm}"
        messages = sum(report.messages for report in reports) / case.world or case.cost.messages
        interface = min(counts) / case.world if counts else None
        enough = len(counts) >= COUNTS and (interface or 0) <= _most(case, messages)
        if enough or not loopback.is_counted() or time.monotonic() > deadline:
            reported = sum(report.bytes_sent for report in reports) / case.world
            return byte_row(case, messages, reported, interface) | {"reason": reports[0].reason}


def byte_row(case: Case, messages: float, reported: float, interface: float | None) -> Row:
    """Return the row of a case: bytes and messages that each rank sent, as means over ranks.

    interface   bytes on the interface. None if the system has no counters or the interface was never quiet.
    """
    sent, fault = case.cost.sent, None
    if abs(reported / sent - 1) > LIMIT:
        fault = f"{case}: reported {reported:,.0f} bytes, expected {sent:,.0f} within {LIMIT:.0%}"
    elif interface is not None and not sent * (1 - LIMIT) <= interface <= _most(case, messages):
        fault = (
            f"{case}: {interface:,.0f} bytes on the interface, expected {sent:,.0f} within {LIMIT:.0%} and "
            f"{FRAMING_LIMIT} for each of {messages:g} messages; was something else on it?"
        )
    return {
        "kind": "allreduce bytes",
        "world": case.world,
        "spec": case.spec,
        "algorithm": case.algorithm,
        "numel": case.numel,
        "chosen": case.chosen,
        "messages": messages,
        "formula_bytes": sent,
        "reported_bytes": reported,
        "interface_bytes": interface,
        "reported_off": reported / sent - 1,
        "interface_off": None if interface is None else interface / sent - 1,
        "framing_bytes_per_message": None if interface is None else (interface - reported) / messages,
        "fault": fault,
    }


def _most(case: Case, messages: float) -> float:
    """Return the largest number of bytes on the interface that is accepted."""
    return case.cost.sent * (1 + LIMIT) + messages * FRAMING_LIMIT


class Timer:
    """Runs on each rank and times every job once in a turn.

    Gradients are windows of one pool of random numbers, and successive jobs get different ones.
    """

    def __init__(self, rank: int, size: int, spec: str, numel: int) -> None:
        compressor = thinwire.compressor(spec)
        self._pool = torch.randn(numel + _SHIFTS * _STRIDE, generator=torch.Generator().manual_seed(rank))
        self._turn = 0
        self._tensor = torch.empty(numel)
        alone, gathered, other = (torch.zeros(numel) for _ in range(3))
        state = ShardState()
        rows = torch.empty(size, compressor.nbytes(numel), dtype=torch.uint8)
        payload = torch.empty_like(rows[0])
        key = 0 if compressor.draws else None
        tensor, algorithm = self._tensor, flat(compressor, numel)
        sent = compressor.compress(self._pool[:numel], key=key, out=payload)
        self._jobs: dict[str, Callable[[], object]] = {
            BARRIER: lambda: None,
            PARTS[0]: lambda: compressor.compress(tensor, alone, key=key, out=payload),
            PARTS[1]: lambda: dist.all_gather(list(rows), payload),
            PARTS[2]: lambda: compressor.decompress(sent, tensor, payloads=rows),
            WHOLE: lambda: all_reduce_compressed(tensor, compressor, gathered, algorithm=WHOLE),
            algorithm: lambda: all_reduce_compressed(tensor, compressor, other, algorithm=algorithm, state=state),
            "torch all_reduce": lambda: dist.all_reduce(tensor),
        }

    def turn(self) -> dict[str, Span]:
        """Run every job once and return its start and end."""
        return {name: self._time(job) for name, job in self._jobs.items()}

    def _time(self, job: Callable[[], object]) -> Span:
        self._tensor.copy_(self._gradient())
        dist.barrier()
        started = time.perf_counter()
        job()
        ended = time.perf_counter()
        dist.barrier()  # else the next copy would take the core from a rank that is not done
        return started, ended

    def _gradient(self) -> Tensor:
        self._turn += 1
        return self._pool[self._turn % _SHIFTS * _STRIDE :][: self._tensor.numel()]


def time_parts(spec: str, numel: int, ranks: int, repeats: int, workers: Workers, progress: Progress) -> Iterator[Row]:
    """Time all jobs in turns. Yield a row for each, and the ratio of the whole operation to the sum of its parts."""
    title = f"{ranks} ranks, {numel:,} x float32"
    progress.start(f"{title}, start")
    workers.form(ranks, Timer, spec, numel)
    workers.ask("turn")
    progress.finish("ready")
    turns: list[dict[str, float]] = []
    for number in range(1, repeats + 1):
        progress.start(f"{title}, turn {number}")
        turns.append(_milliseconds(workers.ask("turn")))
        progress.finish(f"{turns[-1][WHOLE]:.4g} ms")
    ready, medians = median(turn[BARRIER] for turn in turns), {}
    for name in turns[0]:
        times = timing([turn[name] - (ready if name != BARRIER else 0.0) for turn in turns])
        medians[name] = times["p50"]
        yield {"kind": "allreduce time", "name": name, "numel": numel, "ranks": ranks, "ms": times}
    whole, parts = medians[WHOLE], sum(medians[part] for part in PARTS)
    ratio = whole / parts if parts > 0 else None  # they may take no longer than the barrier
    yield {"kind": "allreduce ratio", "whole_ms": whole, "parts_ms": parts, "ratio": ratio}


def _milliseconds(spans: list[dict[str, Span]]) -> dict[str, float]:
    """Return the milliseconds of each job from the first rank's start to the last rank's end.

    >>> _milliseconds([{"job": (1.0, 1.25)}, {"job": (1.125, 1.5)}])
    {'job': 500.0}
    """
    return {
        name: 1e3 * (max(rank[name][1] for rank in spans) - min(rank[name][0] for rank in spans)) for name in spans[0]
    }
