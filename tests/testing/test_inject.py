"""Faults happen on their rank at their step, and nowhere else; one that could not happen is an error."""

from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from support.damage import DamagedPayload
from thinwire.collectives import LocalGroup
from thinwire.collectives.transport.link import GlooLink
from thinwire.testing import (
    LOST,
    Fault,
    InjectedError,
    Kill,
    NotFinite,
    RaiseError,
    RankPool,
    Stop,
    inject,
    run_threads,
)

STEPS = 4
SPEC = "topk:ratio=1/4,bits=2,chunk=64"


def train(group: LocalGroup | None, rank: int, faults: list[Fault], timeout: float = 30.0) -> list[Any]:
    """Plain loop. Returns, for each step, the gradient's sum or the error's name."""
    collective = thinwire.Collective(timeout=timeout)
    sync = thinwire.Synchronizer(thinwire.Policy(SPEC, min_numel=1), group=group, collective=collective)
    model = nn.Linear(64, 4, bias=False)
    found: list[Any] = []
    for step in range(STEPS):
        model.zero_grad()
        try:
            with inject(faults, step, group=group, parameters=model.parameters()):
                model(torch.full((1, 64), float(1 + rank + step))).sum().backward()
                sync.all_reduce_gradients(model.named_parameters())
        except (thinwire.CollectiveError, InjectedError) as error:
            return [*found, type(error).__name__]
        assert model.weight.grad is not None
        found.append(float(model.weight.grad.sum()))
    return found


def clear(payload: torch.Tensor) -> None:
    """The bitmap of top-k's positions then has too few bits."""
    payload.zero_()


def threads(faults: list[Fault], world_size: int = 2) -> list[list[Any]]:
    return run_threads(lambda group: train(group, group.rank, faults), world_size)


def test_not_finite_voids_one_step_on_all_ranks_and_stop_delays_one() -> None:
    plain = threads([])
    assert plain[0] == plain[1]
    assert all(torch.tensor(plain[0]).isfinite())
    for value in (float("nan"), float("inf")):
        for sums in threads([NotFinite(rank=1, step=2, value=value, element=7)]):
            assert [step for step, total in enumerate(sums) if total != total] == [2], value
    assert threads([Stop(rank=1, step=1, seconds=0.05)]) == plain


def test_raise_error_ends_a_rank_and_the_others_learn_it() -> None:
    def work(group: LocalGroup) -> list[Any]:
        found = train(group, group.rank, [RaiseError(rank=0, step=1)])
        if found[-1] == "InjectedError":
            group.leave("of a fault")
        return found

    one, other = run_threads(work, 2)
    assert one[1:] == ["InjectedError"]
    assert other[1:] == ["MismatchError"]
    with pytest.raises(ZeroDivisionError):
        threads([RaiseError(rank=1, step=0, error=ZeroDivisionError())])


def test_a_fault_that_cannot_happen_is_an_error() -> None:
    for fault, message in {
        Kill(rank=1, step=1): "use a RankPool",
        DamagedPayload(rank=1, step=1): "use a RankPool",
        NotFinite(rank=0, step=0, parameter=1): "was given 1 parameters: give more",
    }.items():
        with pytest.raises(ValueError, match=message):
            threads([fault])

    def work(group: LocalGroup) -> None:
        with inject([NotFinite(0, 0)], 0, group=group, parameters=[torch.zeros(3, requires_grad=True)]):
            pass

    with pytest.raises(ValueError, match="did not happen"):
        run_threads(work, 1)


def train_process(rank: int, world_size: int, faults: list[Fault]) -> list[Any]:
    return train(None, rank, faults)


def test_kill_and_stop_in_a_process(ranks: RankPool) -> None:
    lost, left = ranks.run(train_process, 2, [Kill(rank=0, step=2)], lost=[0])
    assert lost is LOST
    assert left[2:] == ["PeerError"]
    stopped, plain = (ranks.run(train_process, 2, faults) for faults in ([Stop(1, 1, seconds=0.3)], []))
    assert stopped == plain, "it is waited for"


def send_little(rank: int, world_size: int) -> None:
    post = GlooLink.post
    with (
        pytest.raises(ValueError, match="the rank sent no payload of 3 bytes"),
        inject([DamagedPayload(rank, 0, nbytes=3)], 0),
    ):
        thinwire.all_reduce_compressed(torch.ones(4), "none")
    assert GlooLink.post is post, "left as it was"


def test_a_damaged_payload_is_refused_by_its_receiver_and_one_that_is_not_sent_is_an_error(ranks: RankPool) -> None:
    """In transit alone, the sender learns of it at its next step at the latest."""
    for peer in (None, 0):
        one, other = ranks.run(train_process, 2, [DamagedPayload(1, 2, clear, peer)])
        assert (one[2:], other[-1]) == (["PeerError"], "PeerError"), peer
        assert len(other) in ((3,) if peer is None else (3, 4))
    ranks.run(send_little, 2)
