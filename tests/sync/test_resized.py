"""Residuals when training goes on with another number of ranks: in the end all that came in has come out.

The sums are made outside of the library. Steps without gradients send what is left, so that no residual is read here.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from support.training import averaged
from thinwire import Collective
from thinwire.collectives import LocalGroup, LocalWorld
from thinwire.testing import run_threads

SIZES = {"a": 6000, "b": 9000}
POLICY = thinwire.Policy("topk:ratio=1/8,bits=32,chunk=512", min_numel=0)
OF_SUMS = "topk:ratio=1/8,bits=32,chunk=512"
"""The compressor of sums sends half of what two ranks send, so that owners keep the other half."""


def gradient(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def take(sync: thinwire.Synchronizer, given: dict[str, Tensor], out: dict[str, Tensor]) -> None:
    for name, average in averaged(sync, **given).items():
        out[name] += average.double()


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}


def begin(group: LocalGroup, algorithm: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    sync, out = make(group, algorithm), zeros()
    for step in range(4):
        take(sync, gradient(group.rank, step), out)
    return sync.state_dict(), out


def go_on(group: LocalGroup, algorithm: str, states: list[dict[str, Any]]) -> tuple[dict[str, Tensor], float]:
    sync, out = make(group, algorithm), zeros()
    sync.load_state_dict(states)
    for _ in range(24):
        take(sync, {name: torch.zeros(size) for name, size in SIZES.items()}, out)
    return out, sync.residual_norm()


def make(group: LocalGroup, algorithm: str) -> thinwire.Synchronizer:
    second = OF_SUMS if algorithm == "sharded" else None
    return thinwire.Synchronizer(
        POLICY, group=group, collective=Collective(algorithm=algorithm, shard_compressor=second)
    )


@pytest.mark.parametrize(("algorithm", "before", "after"), [("sharded", 2, 3), ("sharded", 3, 1), ("gather", 3, 2)])
def test_what_came_in_is_sent_or_kept_after_a_change_of_ranks(algorithm: str, before: int, after: int) -> None:
    saved = run_threads(begin, before, algorithm)
    ends = run_threads(go_on, after, algorithm, [state for state, _ in saved])
    for name in SIZES:
        average = sum(gradient(rank, step)[name].double() for rank in range(before) for step in range(4)) / before
        sent = saved[0][1][name]
        assert float((average - sent).norm() / average.norm()) > 0.3, "much must be left at the change"
        for out, norm in ends:
            assert norm == 0.0, "24 steps send all that is left"
            torch.testing.assert_close(sent + out[name], average, rtol=1e-5, atol=1e-5)


def momentum_run(group: LocalGroup, states: list[dict[str, Any]] | None, ends: bool) -> Any:
    """The state after four steps; or the weights after six more without gradients, which momentum alone moves."""
    named = {name: nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
    optimizer = thinwire.SGD(named.items(), lr=0.5, momentum=0.9, compressor="topk:ratio=1,bits=32", group=group)
    if states is not None:
        optimizer.load_state_dict([state["optimizer"] for state in states])
        for name, parameter in named.items():
            parameter.data.copy_(states[0]["weights"][name])
    for step in range(0 if states is None else 4, 10 if ends else 4):
        given = gradient(group.rank, step) if step < 4 else {name: torch.zeros(size) for name, size in SIZES.items()}
        for name, parameter in named.items():
            parameter.grad = given[name]
        optimizer.step()
    weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    return weights if ends else {"optimizer": optimizer.state_dict(), "weights": weights}


def test_momentum_goes_on_after_a_change_of_ranks() -> None:
    """Its average over ranks counts. Of three ranks, the last takes over nothing of two."""
    uninterrupted = run_threads(momentum_run, 2, None, True)[0]
    saved = run_threads(momentum_run, 2, None, False)
    for weights in run_threads(momentum_run, 1, saved, True) + run_threads(momentum_run, 3, saved, True):
        for name, weight in weights.items():
            assert float((weight - saved[0]["weights"][name]).norm()) > 1.0, "momentum must move it"
            torch.testing.assert_close(weight, uninterrupted[name], rtol=1e-5, atol=1e-5)


def test_shares_of_residuals_stay_the_same_when_members_leave() -> None:
    group: Any = LocalWorld(4).groups[0]
    sync = thinwire.Synchronizer(POLICY, group=group)
    sync.unsent.slice(["a"], [5], torch.float32, torch.device("cpu")).fill_(1.0)
    assert sync.world_size == 4
    group.size = 2  # as that of an `ElasticGroup` whose members leave
    sync.follow_group(4)
    assert (sync.world_size, sync.residuals["a"].tolist()) == (2, [0.5] * 5)
