"""What owners keep: needed with a residual, saved and loaded, refused where it does not fit."""

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
    residual, state = torch.zeros(NUMEL), thinwire.ShardState()
    assert state.residual is None
    step(rank, 0, residual, state, group=group)
    assert state.residual is not None
    saved: dict[str, Any] = state.state_dict()
    saved = {name: value.clone() if isinstance(value, Tensor) else value for name, value in saved.items()}
    residual_again, again = residual.clone(), thinwire.ShardState()
    whole = [step(rank, number, residual, state, group=group) for number in (1, 2)]
    again.load_state_dict(saved)
    parts = [step(rank, number, residual_again, again, group=group) for number in (1, 2)]
    assert [bytes_of(t) for t in whole] == [bytes_of(t) for t in parts]
    assert bytes_of(residual) == bytes_of(residual_again)
    with pytest.raises(ValueError, match="state"):
        again.load_state_dict({"something": "else"})
    return [bytes_of(t) for t in whole]


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
