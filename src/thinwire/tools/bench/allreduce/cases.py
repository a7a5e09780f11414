"""The cases whose bytes are counted: every algorithm that a compressor supports, with the cost from its formula."""

from dataclasses import dataclass

import torch

from thinwire import compressors
from thinwire.collectives import cost
from thinwire.collectives.cost import Cost
from thinwire.collectives.plan import choose
from thinwire.compressors import Compressor
from thinwire.kernels.layout import RandomKLayout

VALUES_SPEC = "randomk:ratio=1/64"
"""Compressor that is counted in addition to the requested one.

The algorithm `values` needs a compressor that draws the same positions on all ranks.
"""
TORCH = "torch"
"""Name used for `none` without a residual, which runs torch's own all-reduce."""


@dataclass(frozen=True)
class Case:
    """A compressor and an algorithm for a float32 tensor and a world size. It becomes one row of the table of bytes."""

    world: int
    spec: str
    algorithm: str
    """The requested algorithm, which may be "auto"."""
    numel: int
    chosen: str
    """The algorithm that runs."""
    cost: Cost
    """Cost of the chosen algorithm, from its formula."""

    @property
    def title(self) -> str:
        """World size, compressor and algorithm, as text."""
        return f"{self.world} ranks, {self.spec}, {self.algorithm}"


def cases(spec: str, compressor: Compressor, numel: int, world: int) -> list[Case]:
    """Return all cases of one world size.

    If the ranks of the compressor keep different positions, the cases of `VALUES_SPEC` are added.
    """
    found = [
        _case(spec, compressor, name, numel, world) for name in ("gather", flat(compressor, numel), "dense", "auto")
    ]
    drawn = compressors.compressor(VALUES_SPEC)
    if flat(compressor, numel) != "values" and flat(drawn, numel) == "values":
        found += [_case(VALUES_SPEC, drawn, name, numel, world) for name in ("values", "auto")]
    return [*found, Case(world, "none", TORCH, numel, "dense", cost.dense(numel, torch.float32, world))]


def flat(compressor: Compressor, numel: int) -> str:
    """Return the algorithm for this compressor whose bytes do not grow with the world size."""
    return "values" if isinstance(compressor.layout(numel, torch.float32), RandomKLayout) else "sharded"


def keeps(compressor: Compressor) -> bool:
    """Return whether the compressor takes a residual in both stages. Without one, values that are not sent are lost."""
    return compressor.contracts and compressor.for_sum(2).contracts


def _case(spec: str, first: Compressor, algorithm: str, numel: int, world: int) -> Case:
    second, dtype = first.for_sum(world), torch.float32
    chosen, _ = choose(algorithm, first, second, numel, dtype, world, can_shard=keeps(first))
    return Case(world, spec, algorithm, numel, chosen, cost.of(chosen, first, second, numel, dtype, world))
