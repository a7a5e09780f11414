"""What was sent plus what was kept is what came in, over all ranks and over many steps."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from ranks import Ranks

NUMEL, STEPS = 5000, 200
TOPK, SMALL, QUANTIZE, RANDOMK = (
    "topk:ratio=1/64,bits=2", "topk:ratio=1/16,bits=4,chunk=64", "quantize:bits=2,block=64", "randomk:ratio=1/16",
)  # fmt: skip


class Way(NamedTuple):
    """One way to reduce; `mesh` is the number of nodes and of ranks in each, () without nodes."""

    spec: str
    algorithm: str
    average: bool = False
    mesh: tuple[int, int] | tuple[()] = ()
    dtype: torch.dtype = torch.float32


class Ledger(NamedTuple):
    """Sums over all steps, of one rank."""

    came_in: Tensor
    came_out: Tensor
    kept: Tensor
    owned: Tensor
    """What this rank keeps as an owner, at its place in the whole tensor."""


WAYS = [
    Way(TOPK, "gather"),
    Way(SMALL, "gather", average=True),
    Way(SMALL, "sharded"),
    Way(TOPK, "sharded", average=True),
    Way(QUANTIZE, "sharded"),
    Way(QUANTIZE, "gather", average=True),
    Way(TOPK, "dense"),
    Way(TOPK, "dense", average=True),
    Way(RANDOMK, "values"),
    Way(RANDOMK, "values", average=True),
    Way(SMALL, "sharded", dtype=torch.float64),
    Way(SMALL, "gather", dtype=torch.bfloat16),
]
FEW = [Way(SMALL, "gather"), Way(SMALL, "sharded", average=True), Way(QUANTIZE, "sharded"), Way(RANDOMK, "values")]


def mesh_ways(nodes: int, each: int) -> list[Way]:
    return [
        Way(SMALL, "gather", mesh=(nodes, each)),
        Way(SMALL, "sharded", average=True, mesh=(nodes, each)),
        Way(QUANTIZE, "gather", mesh=(nodes, each)),
        Way(RANDOMK, "values", average=True, mesh=(nodes, each)),
    ]


def keep_ledgers(rank: int, world_size: int, ways: list[Way], steps: int) -> list[Ledger]:
    meshes = {way.mesh: init_device_mesh("cpu", way.mesh) for way in ways if way.mesh}
    return [keep_ledger(rank, world_size, way, steps, meshes.get(way.mesh)) for way in ways]


def keep_ledger(rank: int, world_size: int, way: Way, steps: int, group: Any) -> Ledger:
    generator = torch.Generator().manual_seed(rank)
    kept = torch.zeros(NUMEL, dtype=torch.float64 if way.dtype == torch.float64 else torch.float32)
    state, compressor = thinwire.ShardState(), thinwire.compressor(way.spec)
    came_in, came_out = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    op = dist.ReduceOp.AVG if way.average else dist.ReduceOp.SUM
    for _ in range(steps):
        tensor = torch.randn(NUMEL, generator=generator).to(way.dtype)
        came_in += tensor
        thinwire.all_reduce_compressed(
            tensor, compressor, kept, op=op, group=group, algorithm=way.algorithm, state=state
        )
        came_out += tensor.double() * (world_size if way.average else 1)
    owned, at = torch.zeros(NUMEL, dtype=torch.float64), 0
    for start, stop in state.spans:
        owned[start:stop] = state.residual[at : (at := at + stop - start)]  # type: ignore[index]
    return Ledger(came_in, came_out, kept, owned)


def check_ledgers(ways: list[Way], found: list[list[Ledger]], steps: int) -> None:
    for way, ledgers in zip(ways, zip(*found, strict=True), strict=True):
        came_in = sum(ledger.came_in for ledger in ledgers)
        out = ledgers[0].came_out + sum(ledger.kept.double() + ledger.owned for ledger in ledgers)
        assert (way.algorithm == "sharded") == any(ledger.owned.any() for ledger in ledgers), way
        # Every step rounds once or twice; steps are independent, so errors grow with the root of their number.
        rounding = torch.finfo(way.dtype).eps * max(steps, 1) ** 0.5
        error = float((out - came_in).abs().max() / came_in.abs().max())
        assert error < 2 * rounding, f"{way}: {error:.2g} of what came in is lost"
        sent = float(ledgers[0].came_out.norm() / came_in.norm())
        assert sent > 0.5, f"{way}: only {sent:.2g} of what came in went out"


def test_nothing_is_lost_in_200_steps(ranks: Ranks) -> None:
    check_ledgers(WAYS, ranks.run(keep_ledgers, 3, WAYS, STEPS, timeout=120), STEPS)


@pytest.mark.parametrize(("world_size", "steps"), [(2, STEPS), (4, 60), (8, 30)])
def test_nothing_is_lost_in_a_small_or_a_larger_world(ranks: Ranks, world_size: int, steps: int) -> None:
    check_ledgers(FEW, ranks.run(keep_ledgers, world_size, FEW, steps, timeout=120), steps)


@pytest.mark.parametrize(("nodes", "each", "steps"), [(2, 2, 60), (2, 4, 15)])
def test_nothing_is_lost_between_nodes(ranks: Ranks, nodes: int, each: int, steps: int) -> None:
    ways = mesh_ways(nodes, each)
    check_ledgers(ways, ranks.run(keep_ledgers, nodes * each, ways, steps, timeout=120), steps)
