"""Several all-reduces under way, of which ranks have different ones at the same time: no ranks wait in a circle."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from support.wires import SECONDS, Holding
from thinwire.collectives.groups import channels
from thinwire.testing import RankPool, store_barrier

NUMEL, COUNT = 30_000, 6


def start(group: Any, number: int, **options: Any) -> tuple[Any, torch.Tensor]:
    tensor = torch.full((NUMEL,), 127.0 * number)  # eight bits hold it exactly
    return thinwire.all_reduce_compressed(
        tensor, "quantize:bits=8", group=group, async_op=True, timeout=SECONDS, **options
    ), tensor


def start_together(group: Any, **options: Any) -> list[tuple[Any, torch.Tensor]]:
    """The wire finds all of them when it looks for the first."""
    wire, holding = channels(group, torch.device("cpu"))[-1].wire, Holding()
    assert wire is not None
    wire.submit(holding)
    assert holding.begun.wait(SECONDS)
    started = [start(group, number, **options) for number in range(COUNT)]
    holding.free.set()
    return started


def come_apart(rank: int, world_size: int, nodes: bool, slow: list[int], options: dict[str, Any]) -> list[bool]:
    """Ranks in `slow` wait for each before they start the next; the others have all of them under way at once."""
    group = None
    if nodes:
        inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        group = (inside, between)
    work, tensor = start(group, 1, **options)  # all agree, and connect
    work.wait(SECONDS)
    store_barrier("all are connected", world_size)
    right = []
    if rank not in slow:
        started = start_together(group, **options)
        store_barrier("some have started", world_size - len(slow))
        for work, _ in started:
            work.wait(SECONDS)
        right = [bool((tensor == 127 * number * world_size).all()) for number, (_, tensor) in enumerate(started)]
    for number in range(COUNT if rank in slow else 0):
        work, tensor = start(group, number, **options)
        work.wait(SECONDS)
        right.append(bool((tensor == 127 * number * world_size).all()))
    return right


@pytest.mark.parametrize(("algorithm", "slow"), [("gather", [0]), ("sharded", [1, 2]), ("sharded", [0, 1, 3])])
def test_between_nodes(ranks: RankPool, algorithm: str, slow: list[int]) -> None:
    """Three rounds, or four: such a reduction must not wait behind the first rounds of others."""
    found = ranks.run(come_apart, 4, True, slow, {"algorithm": algorithm})
    assert found == [[True] * COUNT] * 4


@pytest.mark.parametrize(("options", "slow"), [({}, [0]), ({"max_bytes": 400_000}, [1, 2])], ids=["whole", "segments"])
def test_in_one_group(ranks: RankPool, options: dict[str, Any], slow: list[int]) -> None:
    found = ranks.run(come_apart, 3, False, slow, {"algorithm": "sharded", **options})
    assert found == [[True] * COUNT] * 3
