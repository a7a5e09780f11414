"""Build a case from the measurements of all ranks: the rate of the links, and the CPU time for their use."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from statistics import median
from typing import NamedTuple

from .cluster import Cluster
from .combine import Measured, combine
from .measure import Wire
from .model import Case
from .work import Work, of_sizes


class Answer(NamedTuple):
    """All measurements of one rank."""

    measured: Measured
    wire: Wire
    inside: Wire | None
    """Wire among the ranks of its node; None if the node has only one rank, or if there is only one node."""
    sizes: list[int]
    """Numel of each trainable parameter of the model."""


def case_of(answers: Sequence[Answer], ranks_per_host: int, origin: str, crowd: float, slows: float | None) -> Case:
    """Build the case from the answers of all ranks.

    origin   where the measurements were made, as text for the user.
    crowd    ranks per core, at least 1.
    slows    value of `Cluster.codec_slows` and `Cluster.wire_slows`; None if the model runs on an accelerator.
    """
    sizes = answers[0].sizes
    together = combine([answer.measured for answer in answers], sum(sizes), origin, crowd)
    world = len(answers)
    wires = [answer.wire for answer in answers]
    ring, spread = median(w.ring_byte for w in wires), median(w.spread_byte for w in wires)
    ring_work, spread_work = (
        min(ring, median(w.ring_work for w in wires)),
        min(spread, median(w.spread_work for w in wires)),
    )
    # If all ranks are on one node, each counts as a node with a link of its own.
    each = ranks_per_host if ranks_per_host < world else 1
    inside = [8 / _link(w.ring_byte, w.ring_work) for answer in answers if (w := answer.inside) is not None]
    cluster = Cluster(
        world, 8 / _link(ring, ring_work), max(w.latency for w in wires), each,
        inside=median(inside) if inside else Cluster.inside, peer_share=1.0, spread_share=1.0, trees=slows is None,
        codec_slows=slows or 0.0, wire_slows=slows or 0.0,
    )  # fmt: skip
    as_spread = replace(cluster, spread_share=cluster.spread_seconds(1.0) / _link(spread, spread_work))
    fp16 = max(ring_work, together.speeds.fp16_byte - together.speeds.ring_byte + ring_work)
    speeds = replace(
        together.speeds, ring_byte=ring_work, fp16_byte=0.0 if slows is None else fp16, spread_byte=spread_work
    )
    return Case(Work(of_sizes(sizes), *together.nothing), as_spread, speeds)


def _link(byte: float, work: float) -> float:
    """Return the seconds per byte of the link alone: the inverse of `model.seconds_of`."""
    return sqrt(max(byte**2 - work**2, (0.1 * byte) ** 2))
