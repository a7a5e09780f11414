"""Random draws of training steps: new ones at every step and of each slice."""

import torch
from torch import Tensor

import thinwire
from support.training import averaged
from thinwire.collectives import LocalGroup
from thinwire.testing import run_threads

NUMEL = 8192
RANDOMK = thinwire.Policy("randomk:ratio=1/8", min_numel=0)


def reached(group: LocalGroup) -> float:
    """The share of elements that 40 steps have sent."""
    sync, total = thinwire.Synchronizer(RANDOMK, group=group), torch.zeros(NUMEL)
    for _ in range(40):
        total += averaged(sync, weight=torch.ones(NUMEL))["weight"]
    return float(total.count_nonzero()) / NUMEL


def test_random_k_reaches_nearly_all_elements() -> None:
    """One of eight is left out by all 40 steps with a probability of (7/8) ** 40 = 0.5 %."""
    for share in run_threads(reached, 2):
        assert 0.985 < share < 1.0


def positions(group: LocalGroup) -> tuple[Tensor, Tensor]:
    """The elements sent of two tensors of one size, which are not in one slice because of their dtypes."""
    sync = thinwire.Synchronizer(RANDOMK, group=group)
    found = averaged(sync, one=torch.ones(NUMEL), other=torch.ones(NUMEL, dtype=torch.float64))
    return found["one"] != 0, found["other"] != 0


def test_slices_draw_on_their_own() -> None:
    for one, other in run_threads(positions, 2):
        assert int(one.sum()) == int(other.sum()) == NUMEL // 8
        assert 0.05 < float((one & other).sum()) / int(one.sum()) < 0.25, "one in eight is in both by chance"
