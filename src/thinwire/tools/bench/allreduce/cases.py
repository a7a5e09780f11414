"""Whose bytes are counted: every algorithm that a compressor can go by, with what its formula says."""

from dataclasses import dataclass

import torch

from thinwire import compressors
from thinwire.collectives import cost
from thinwire.collectives.cost import Cost
from thinwire.collectives.plan import choose
from thinwire.compressors import Compressor
from thinwire.kernels.layout import RandomKLayout

VALUES_SPEC = "randomk:ratio=1/64"
"""Counted beside the compressor asked for: `values` is for those that draw the same positions on all ranks."""
TORCH = "torch"
"""The algorithm's name for `none` without a residual, which is passed on to torch's own all-reduce."""


@dataclass(frozen=True)
class Case:
    """One row of bytes to be: a compressor and an algorithm, for a float32 tensor in a world."""

    world: int
    spec: str
    algorithm: str
    """As it is asked for."""
    numel: int
    chosen: str
    """The algorithm that will run."""
    cost: Cost
    """Of that one, by its formula."""

    @property
    def title(self) -> str:
        return f"{self.world} ranks, {self.spec}, {self.algorithm}"


def cases(spec: str, compressor: Compressor, numel: int, world: int) -> list[Case]:
    """All of one world. For a compressor whose ranks keep different positions, `VALUES_SPEC` too."""
    found = [
        _case(spec, compressor, name, numel, world) for name in ("gather", flat(compressor, numel), "dense", "auto")
    ]
    drawn = compressors.compressor(VALUES_SPEC)
    if flat(compressor, numel) != "values" and flat(drawn, numel) == "values":
        found += [_case(VALUES_SPEC, drawn, name, numel, world) for name in ("values", "auto")]
    return [*found, Case(world, "none", TORCH, numel, "dense", cost.dense(numel, torch.float32, world))]


def flat(compressor: Compressor, numel: int) -> str:
    """The algorithm of this compressor whose bytes do not grow with the world."""
    return "values" if isinstance(compressor.layout(numel, torch.float32), RandomKLayout) else "sharded"


def keeps(compressor: Compressor) -> bool:
    """Whether it takes a residual, in both stages. Where it does not, what is not sent is lost."""
    return compressor.contracts and compressor.for_sum(2).contracts


def _case(spec: str, first: Compressor, algorithm: str, numel: int, world: int) -> Case:
    second, dtype = first.for_sum(world), torch.float32
    chosen, _ = choose(algorithm, first, second, numel, dtype, world, can_shard=keeps(first))
    return Case(world, spec, algorithm, numel, chosen, cost.of(chosen, first, second, numel, dtype, world))
