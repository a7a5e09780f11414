"""`adapt_every`: bytes are shared by the residuals of all ranks, and what is shared is what is sent."""

from fractions import Fraction
from typing import Any

import torch

import thinwire
from support.training import Given
from thinwire.collectives import LocalGroup
from thinwire.testing import run_threads

SIZES = (4096, 4096, 4096)
POLICY = thinwire.Policy("topk:ratio=1/16,bits=32,chunk=512", min_numel=0, adapt_every=3)


def adapt(group: LocalGroup) -> tuple[dict[str, Fraction], list[int]]:
    """The ratios after some steps, and how many elements of each parameter the last of them has sent.

    Rank 0 has large gradients in the first parameter, and rank 1 as large ones in the second.
    """
    model = Given(SIZES)
    sync = thinwire.Synchronizer(POLICY, group=group, algorithm="gather")
    for step in range(5):
        model.zero_grad()
        generator = torch.Generator().manual_seed(step)
        given = [torch.randn(size, generator=generator) for size in SIZES]
        given[group.rank] *= 100.0
        model(given).backward()
        sync.all_reduce_gradients(model)
    state: dict[str, Any] = sync.state_dict()
    sent = [int(weight.grad.count_nonzero()) for weight in model.weights if weight.grad is not None]
    return {name: Fraction(ratio) for name, ratio in state["shared"].items()}, sent


def test_ranks_share_bytes_by_the_residuals_of_all() -> None:
    (one, _), (other, _) = run_threads(adapt, 2)
    assert one == other
    assert one["weights.0"] == one["weights.1"] > one["weights.2"]


def test_other_ratios_are_those_that_are_sent() -> None:
    ((shared, sent),) = run_threads(adapt, 1)
    assert shared["weights.0"] > shared["weights.1"]
    assert sent == [4096 * shared[f"weights.{number}"] for number in range(3)]
