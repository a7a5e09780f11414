"""`none` without a residual is torch's own all-reduce: its bits, and our errors around it."""

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
        ours, theirs = given.clone(), given.clone()
        thinwire.all_reduce_compressed(ours, "none", async_op=True).wait()
        dist.all_reduce(theirs)
        assert same_bits(ours, theirs), dtype
        ours, theirs = given.clone(), given.clone()
        thinwire.all_reduce_compressed(ours, thinwire.NoCompression(), op=dist.ReduceOp.AVG)
        dist.all_reduce(theirs)
        assert same_bits(ours, theirs.div_(world_size)), dtype


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_is_torchs_own(ranks: RankPool, world_size: int) -> None:
    ranks.run(compare, world_size)


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
