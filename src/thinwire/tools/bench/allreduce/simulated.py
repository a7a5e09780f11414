"""Computes the cost of an all-reduce for any world size, from the formulas that it is planned with. Nothing runs."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch

from thinwire.collectives import cost
from thinwire.collectives.plan import DEFAULT_MAX_BYTES, Plan, choose, plan
from thinwire.compressors import Compressor

from .cases import flat, keeps
from .settings import Settings

WORLDS = tuple(2**power for power in range(1, 13))
RANKS_IN_NODE = 8
_UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class SimulatedRow:
    """Cost of one operation for each rank."""

    world: int
    algorithm: str
    """Name of the algorithm.

    Hierarchical rows have nodes of 8 ranks and use the algorithm that "auto" chooses between nodes.
    """
    sent: float
    between_nodes: float
    """Part of `sent` that leaves the node. With one stage it is all of `sent`, as in the report of the operation."""
    messages: int
    memory: int
    """Bytes beyond tensor and residuals if the operation is not cut into segments."""
    budget_segments: int | None
    """Number of segments under the default memory budget. None if the budget cannot hold even the smallest segment."""
    budget_messages: int | None
    budget_memory: int | None
    numel: int

    def record(self) -> dict[str, object]:
        """Return the row as a dict for one line of JSON."""
        return {"kind": "allreduce simulation", **asdict(self)}


def simulate(settings: Settings) -> Iterator[SimulatedRow]:
    """Yield the rows ordered by world size, with dense last for each."""
    if "simulation" not in settings.parts:
        return
    for world in WORLDS:
        for algorithm in ("gather", flat(settings.compressor, settings.numel)):
            yield _row(algorithm, settings.compressor, settings.numel, world, 1)
        if world > RANKS_IN_NODE:
            yield _row("auto", settings.compressor, settings.numel, world // RANKS_IN_NODE, RANKS_IN_NODE)
        yield _row("dense", settings.compressor, settings.numel, world, 1)


def _row(algorithm: str, first: Compressor, numel: int, ranks: int, ranks_in_node: int) -> SimulatedRow:
    """Return the row of one algorithm. `ranks` is the number of ranks in the compressed stage."""
    second, dtype, share = first.for_sum(ranks), torch.float32, -(-numel // ranks_in_node)
    chosen, _ = choose(algorithm, first, second, share, dtype, ranks, can_shard=keeps(first))

    def under(max_bytes: int) -> Plan:
        return plan(chosen, "", first, second, numel, dtype, ranks, ranks_in_node, max_bytes)

    whole, fitting = under(_UNBOUNDED), None
    with suppress(ValueError):  # the row then has None
        fitting = under(DEFAULT_MAX_BYTES)
    inside = cost.dense(numel, dtype, ranks_in_node).sent if ranks_in_node > 1 else 0.0
    return SimulatedRow(
        world=ranks * ranks_in_node,
        algorithm=("hierarchical, " if ranks_in_node > 1 else "") + chosen,
        sent=whole.cost.sent,
        between_nodes=whole.cost.sent - inside,
        messages=whole.cost.messages,
        memory=whole.cost.memory,
        budget_segments=None if fitting is None else len(fitting.segments),
        budget_messages=None if fitting is None else fitting.cost.messages,
        budget_memory=None if fitting is None else fitting.cost.memory,
        numel=numel,
    )
