"""What was sent plus what was kept is what came in, over all ranks and over many steps."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from support.group import run_group
from support.reductions import placed
from support.slow import slow
from thinwire.testing import RankPool

NUMEL = 5000
TOPK, SMALL, QUANTIZE, RANDOMK = (
    "topk:ratio=1/64,bits=2", "topk:ratio=1/16,bits=4,chunk=64", "quantize:bits=2,block=64", "randomk:ratio=1/16",
)  # fmt: skip


class Variant(NamedTuple):
    """One variant of a reduction; `mesh` is the number of nodes and of ranks in each, () without nodes."""

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


VARIANTS = [
    Variant(TOPK, "gather"),
    Variant(SMALL, "gather", average=True),
    Variant(SMALL, "sharded"),
    Variant(TOPK, "sharded", average=True),
    Variant(QUANTIZE, "sharded"),
    Variant(QUANTIZE, "gather", average=True),
    Variant(TOPK, "dense"),
    Variant(TOPK, "dense", average=True),
    Variant(RANDOMK, "values"),
    Variant(RANDOMK, "values", average=True),
    Variant(SMALL, "sharded", dtype=torch.float64),
    Variant(SMALL, "gather", dtype=torch.bfloat16),
]
FEW = [
    Variant(SMALL, "gather"),
    Variant(SMALL, "sharded", average=True),
    Variant(QUANTIZE, "sharded"),
    Variant(QUANTIZE, "gather"),
    Variant(RANDOMK, "values", average=True),
]


def keep_ledgers(rank: int, world_size: int, variants: list[Variant], steps: int, group: Any = None) -> list[Ledger]:
    meshes = {variant.mesh: init_device_mesh("cpu", variant.mesh) for variant in variants if variant.mesh}
    return [keep_ledger(rank, world_size, variant, steps, meshes.get(variant.mesh, group)) for variant in variants]


def keep_ledger(rank: int, world_size: int, variant: Variant, steps: int, group: Any) -> Ledger:
    generator = torch.Generator().manual_seed(rank)
    kept = torch.zeros(NUMEL, dtype=torch.float64 if variant.dtype == torch.float64 else torch.float32)
    state, compressor = thinwire.ShardState(), thinwire.compressor(variant.spec)
    came_in, came_out = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    op = dist.ReduceOp.AVG if variant.average else dist.ReduceOp.SUM
    for _ in range(steps):
        tensor = torch.randn(NUMEL, generator=generator).to(variant.dtype)
        came_in += tensor
        thinwire.all_reduce_compressed(
            tensor, compressor, kept, op=op, group=group, algorithm=variant.algorithm, state=state
        )
        came_out += tensor.double() * (world_size if variant.average else 1)
    return Ledger(came_in, came_out, kept, placed(state, NUMEL, torch.float64))


def check_ledgers(variants: list[Variant], found: list[list[Ledger]], steps: int) -> None:
    for variant, ledgers in zip(variants, zip(*found, strict=True), strict=True):
        came_in = sum(ledger.came_in for ledger in ledgers)
        out = ledgers[0].came_out + sum(ledger.kept.double() + ledger.owned for ledger in ledgers)
        assert (variant.algorithm == "sharded") == any(ledger.owned.any() for ledger in ledgers), variant
        # Every step rounds once or twice; steps are independent, so errors grow with the root of their number.
        rounding = torch.finfo(variant.dtype).eps * max(steps, 1) ** 0.5
        error = float((out - came_in).abs().max() / came_in.abs().max())
        assert error < 2 * rounding, f"{variant}: {error:.2g} of what came in is lost"
        sent = float(ledgers[0].came_out.norm() / came_in.norm())
        assert sent > 0.5, f"{variant}: only {sent:.2g} of what came in went out"


@pytest.mark.parametrize(
    ("world_size", "variants", "steps"),
    [(2, FEW, 200), slow(3, VARIANTS, 200), slow(4, FEW, 60), slow(8, FEW, 30)],
    ids=["2", "3", "4", "8"],
)
def test_nothing_is_lost_in_a_small_or_a_larger_world(world_size: int, variants: list[Variant], steps: int) -> None:
    check_ledgers(variants, run_group(keep_ledgers, world_size, variants, steps, timeout=120), steps)


@pytest.mark.parametrize(("nodes", "each", "steps"), [(2, 2, 60), slow(2, 4, 15)])
def test_nothing_is_lost_between_nodes(ranks: RankPool, nodes: int, each: int, steps: int) -> None:
    variants = [variant._replace(mesh=(nodes, each)) for variant in FEW]
    check_ledgers(variants, ranks.run(keep_ledgers, nodes * each, variants, steps, timeout=120), steps)
