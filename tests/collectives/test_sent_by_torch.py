"""`none` without a residual is torch's own all-reduce: its bits, all its operations, and our errors around it."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from support.oracle import same_bits
from support.slow import slow
from thinwire.testing import LOST, RankPool, store_barrier


def compare(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        given = torch.randn(10_007, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            ours, theirs = given.clone(), given.clone()
            thinwire.all_reduce_compressed(ours, "none", op=op, async_op=True).wait()
            dist.all_reduce(theirs, op)
            assert same_bits(ours, theirs), (dtype, op)
        ours, theirs = given.clone(), given.clone()
        thinwire.all_reduce_compressed(ours, thinwire.NoCompression(), op=dist.ReduceOp.AVG)
        dist.all_reduce(theirs)
        assert same_bits(ours, theirs.div_(world_size)), dtype


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_is_torchs_own(ranks: RankPool, world_size: int) -> None:
    ranks.run(compare, world_size)


def refused(rank: int, world_size: int) -> None:
    ops = dist.ReduceOp
    for op in (ops.PRODUCT, ops.MIN, ops.MAX):
        with pytest.raises(ValueError, match=r"expected SUM or AVG.*use the compressor 'none'"):
            thinwire.all_reduce_compressed(torch.ones(9000), "topk:ratio=1/64", op=op)
        with pytest.raises(ValueError, match="expected SUM or AVG"):
            thinwire.all_reduce_compressed(torch.ones(9000), "none", torch.zeros(9000), op=op)
    for op in (ops.BAND, ops.BOR, ops.BXOR):
        with pytest.raises(ValueError, match=r"expected SUM or AVG: compressed tensors can only be summed"):
            thinwire.all_reduce_compressed(torch.ones(9000), "quantize:bits=8", op=op)


def test_other_operations_are_refused(ranks: RankPool) -> None:
    ranks.run(refused, 2)


def wait_for(rank: int, world_size: int, victim: int, killed: bool) -> Any:
    tensor = torch.ones(9000)
    thinwire.all_reduce_compressed(tensor, "none")
    if rank == victim:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        store_barrier("the others have given up", world_size)
        return None
    with pytest.raises(thinwire.PeerError) as caught:
        thinwire.all_reduce_compressed(tensor, "none", timeout=2.5)
    if not killed:
        store_barrier("the others have given up", world_size)
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("killed", [False, slow(True)])
def test_the_late_or_lost_rank_is_named(ranks: RankPool, killed: bool) -> None:
    """Long before the group's own time-out, which is what torch alone would wait for."""
    found = ranks.run(wait_for, 3, 1, killed, timeout=40, **({"lost": [1]} if killed else {}))
    for rank, answer in enumerate(found):
        if rank == 1:
            assert answer is (LOST if killed else None)
        else:
            assert answer[0] == (1,), answer
            assert f"on rank {rank}: rank 1" in answer[1]
