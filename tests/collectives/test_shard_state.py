"""What owners keep: needed with a residual, saved and loaded, refused where it does not fit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from support.group import run_group
from support.oracle import bytes_of

SPEC, NUMEL = "topk:ratio=1/16,bits=4,chunk=64", 10_000


def step(
    rank: int, number: int, residual: Tensor, state: thinwire.ShardState | None, numel: int = NUMEL, group: Any = None
) -> Tensor:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + number))
    thinwire.all_reduce_compressed(tensor, SPEC, residual, algorithm="sharded", state=state, group=group)
    return tensor


def save_and_load(rank: int, world_size: int, group: Any = None) -> list[bytes]:
    """Three steps in one go, and with everything saved and loaded after the first."""
    residual, state, again = torch.zeros(NUMEL), thinwire.ShardState(), thinwire.ShardState()
    assert state.residual is None
    step(rank, 0, residual, state, group=group)
    again.load_state_dict(copy.deepcopy(state.state_dict()))
    with pytest.raises(ValueError, match="state"):
        again.load_state_dict({"something": "else"})
    ends = []
    for residual_, state_ in ((residual.clone(), state), (residual, again)):
        results = [step(rank, number, residual_, state_, group=group) for number in (1, 2)]
        ends.append([bytes_of(tensor) for tensor in (*results, residual_)])
    assert ends[0] == ends[1]
    return ends[0][:2]


def misuse(rank: int, world_size: int, group: Any = None) -> None:
    residual, state = torch.zeros(NUMEL), thinwire.ShardState()
    with pytest.raises(ValueError, match="state"):
        step(rank, 0, residual, None, group=group)
    step(rank, 0, residual, state, group=group)
    with pytest.raises(ValueError, match="state"):  # it was made for another tensor
        step(rank, 0, torch.zeros(NUMEL // 2), state, NUMEL // 2, group=group)
    tensor = torch.full((NUMEL,), 127.0)  # without a residual there is nothing to keep, and so no need of a state
    thinwire.all_reduce_compressed(tensor, "quantize:bits=8", algorithm="sharded", group=group)
    assert (tensor == 127 * world_size).all()


def test_a_state_is_asked_for_must_fit_and_can_be_saved() -> None:
    run_group(misuse, 2)
    found = run_group(save_and_load, 3)
    assert found[0] == found[1] == found[2]
