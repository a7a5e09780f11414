"""Groups: some of the ranks, several groups at once, and nodes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from support.oracle import bytes_of
from support.slow import slow
from thinwire.collectives.groups import place
from thinwire.testing import RankPool

EXACT = "topk:ratio=1/4,bits=32,chunk=64"
"""Sends whole numbers without loss if not too many are there."""


def sparse(rank: int, numel: int = 10_000) -> torch.Tensor:
    """Whole numbers, few enough for `EXACT`, at places that differ from rank to rank."""
    tensor = torch.zeros(numel)
    tensor[rank::64] = rank + 1
    return tensor


def check(tensor: torch.Tensor, members: list[int], average: bool = False) -> None:
    right = sum(sparse(rank, tensor.numel()) for rank in members)
    assert torch.equal(tensor, right / len(members) if average else right)


def some_ranks(rank: int, world_size: int) -> None:
    """A group of some ranks, of which one is not rank 0; the others get an error that they are not in it."""
    members = [1, 3, 2]
    group = dist.new_group(members)
    for algorithm in ("gather", "sharded", "dense"):
        if rank in members:
            tensor = sparse(rank)
            work = thinwire.all_reduce_compressed(tensor, EXACT, group=group, algorithm=algorithm, op=dist.ReduceOp.AVG)
            check(tensor, members, average=True)
            assert work.report.bytes_sent > 0
        else:
            with pytest.raises(ValueError, match="group"):
                thinwire.all_reduce_compressed(sparse(rank), EXACT, group=group, algorithm=algorithm)
    tensor = sparse(rank)
    thinwire.all_reduce_compressed(tensor, EXACT)
    check(tensor, list(range(world_size)))


def several_groups(rank: int, world_size: int) -> None:
    """Rows, columns and all ranks at once, started and waited for in another order on every rank."""
    groups: list[tuple[Any, list[int]]] = [(None, [0, 1, 2, 3])]
    for members in ([0, 1], [2, 3], [0, 2], [1, 3]):
        group = dist.new_group(members)
        if rank in members:
            groups.append((group, members))
    for step in range(5):
        order = groups[rank % 3 :] + groups[: rank % 3]
        started = []
        for group, members in order:
            for algorithm in ("gather", "sharded"):
                tensor = sparse(rank, 5000 + step)
                work = thinwire.all_reduce_compressed(tensor, EXACT, group=group, algorithm=algorithm, async_op=True)
                started.append((work, tensor, members))
        for work, tensor, members in reversed(started):
            work.wait()
            check(tensor, members)


def test_groups_of_some_ranks(ranks: RankPool) -> None:
    ranks.run(some_ranks, 4)
    ranks.run(several_groups, 4)


def nodes(rank: int, world_size: int, shape: tuple[int, int]) -> list[bytes]:
    """By a mesh and by a pair of groups: the same sums, and the same bits on every rank."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "rank"))
    pair = (mesh.get_group("rank"), mesh.get_group("node"))
    assert place(mesh) == place(pair) == (rank, world_size), "ranks are numbered node by node, as torch does"
    final = thinwire.SGD(torch.nn.Linear(8, 8), lr=0.1, group=mesh).sync.policy.final
    assert final == thinwire.default_compressor(shape[0]), "ranks of a node are summed dense, so it is nodes that count"
    results = []
    for algorithm in ("auto", "gather", "sharded", "dense"):
        found = []
        for group in (mesh, pair):
            tensor = sparse(rank)
            thinwire.all_reduce_compressed(tensor, EXACT, group=group, algorithm=algorithm)
            check(tensor, list(range(world_size)))
            lossy = torch.randn(30_000, generator=torch.Generator().manual_seed(rank))
            residual, state = torch.zeros(30_000), thinwire.ShardState()
            thinwire.all_reduce_compressed(
                lossy, "topk:ratio=1/64,bits=2", residual, group=group, algorithm=algorithm, state=state
            )
            found.append(bytes_of(lossy))
        assert found[0] == found[1], f"{algorithm}: a mesh and its two groups differ"
        results.append(found[0])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        tensor = sparse(rank).to(dtype)
        thinwire.all_reduce_compressed(tensor, EXACT, group=mesh, op=dist.ReduceOp.SUM)
        assert torch.equal(tensor.float(), sum(sparse(other) for other in range(world_size))), dtype
    for numel in (0, 1, 63):
        tensor = sparse(rank, numel)
        thinwire.all_reduce_compressed(tensor, EXACT, group=mesh, op=dist.ReduceOp.AVG)
        check(tensor, list(range(world_size)), average=True)
    return results


@pytest.mark.parametrize("shape", [(2, 2), slow((4, 2)), (1, 3), (3, 1)])
def test_nodes(ranks: RankPool, shape: tuple[int, int]) -> None:
    found = ranks.run(nodes, shape[0] * shape[1], shape)
    for results in zip(*found, strict=True):
        assert len(set(results)) == 1
