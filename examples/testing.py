"""Tests of a training loop with several ranks and with faults. pytest finds them; as a script it runs them, too."""

import math

import torch
from torch import nn

import thinwire
from thinwire.collectives import LocalGroup
from thinwire.testing import LOST, Fault, Kill, NotFinite, RankPool, inject, run_threads

STEPS = 5


def train(group: LocalGroup | None, rank: int, faults: list[Fault]) -> list[float]:
    """The code under test: a plain loop. Returns the sum of the averaged gradient of each step."""
    model = nn.Linear(64, 8)
    sync = thinwire.Synchronizer("quantize:bits=8", group=group, collective=thinwire.Collective(timeout=20.0))
    sums = []
    for step in range(STEPS):
        model.zero_grad()
        with inject(faults, step, group=group, parameters=model.parameters()):
            model(torch.full((1, 64), 1.0 + rank)).sum().backward()
            sync.all_reduce_gradients(model)
        sums.append(sum(float(parameter.grad.sum()) for parameter in model.parameters() if parameter.grad is not None))
    return sums


def test_ranks_agree() -> None:
    one, other = run_threads(lambda group: train(group, group.rank, []), 2)
    assert one == other


def test_a_nan_on_one_rank_is_a_nan_on_all() -> None:
    faults: list[Fault] = [NotFinite(rank=1, step=2)]
    for sums in run_threads(lambda group: train(group, group.rank, faults), 2):
        assert [math.isnan(total) for total in sums] == [False, False, True, False, False]


def train_until_lost(rank: int, world_size: int, faults: list[Fault]) -> str:
    try:
        train(None, rank, faults)
    except thinwire.PeerError as error:
        return f"ranks {error.ranks} are lost"
    return "no rank was lost"


def test_a_rank_that_dies_is_named() -> None:
    with RankPool() as pool:
        assert pool.run(train_until_lost, 2, [Kill(rank=1, step=3)], lost=[1]) == ["ranks (1,) are lost", LOST]


if __name__ == "__main__":
    for test in (test_ranks_agree, test_a_nan_on_one_rank_is_a_nan_on_all, test_a_rank_that_dies_is_named):
        test()
        print(test.__name__, "passed")
