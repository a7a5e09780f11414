"""Residuals of owners: kept by slice, and given back to the parameters when a slice changes."""

from typing import Any

import torch

from thinwire import TopK
from thinwire.sync.buckets import Slice
from thinwire.sync.residuals import Residuals

CPU, TOPK, OTHER = torch.device("cpu"), TopK(ratio="1/64"), TopK(ratio="1/32")


def slice_of(names: str, sizes: list[int], compressor: TopK = TOPK) -> Slice:
    """A dot is a gap."""
    kept = tuple(None if name == "." else name for name in names)
    return Slice(0, sum(sizes), compressor, None, kept, tuple(sizes))


def residuals_for(part: Slice) -> Residuals:
    residuals = Residuals()
    residuals.slice(part.names, part.sizes, torch.float32, CPU)
    return residuals


def set_owner_residual(residuals: Residuals, part: Slice, spans: list[tuple[int, int]]) -> Any:
    """Let this rank own some elements, with the residuals 1, 2, 3 and so on."""
    state = residuals.state(part)
    residual = state.prepare(spans, torch.float32, CPU)
    residual.copy_(torch.arange(1.0, residual.numel() + 1))
    return state


def test_residuals_of_another_slice_go_to_the_parameters() -> None:
    for name, other in {
        "no gap": slice_of("ab", [3, 4]),
        "one alone": slice_of("b", [4]),
        "another compressor": slice_of("a.b", [3, 2, 4], OTHER),
        "another gap": slice_of("a.b", [3, 5, 4]),
    }.items():
        part = slice_of("a.b", [3, 2, 4])
        residuals = residuals_for(part)
        residuals["b"].fill_(10.0)
        set_owner_residual(residuals, part, [(2, 8)])
        state = residuals.state(other)
        assert state.residual is None, name
        for again in range(2):
            assert residuals["a"].tolist() == [0.0, 0.0, 1.0], (name, again)
            # 2 and 3 were the gap's, which no parameter has
            assert residuals["b"].tolist() == [14.0, 15.0, 16.0, 10.0], (name, again)
            assert residuals.state(other) is state


def test_the_same_run_has_the_same_state_and_strangers_are_left_alone() -> None:
    residuals = residuals_for(slice_of("a.b", [3, 2, 4]))
    state = set_owner_residual(residuals, slice_of("a", [3]), [(0, 3)])
    residuals.state(slice_of("b", [4]))
    assert residuals.state(slice_of("a", [3])) is state
    assert not residuals["a"].any()


def test_fold_gives_everything_back_once_of_the_names_that_are_given() -> None:
    part, other = slice_of("ab", [3, 4]), slice_of("c", [2])
    residuals = residuals_for(slice_of("abc", [3, 4, 2]))
    set_owner_residual(residuals, part, [(0, 1), (2, 5)])
    kept = set_owner_residual(residuals, other, [(0, 2)])
    residuals.fold({"b"})
    residuals.fold({"b"})
    assert residuals.state(other) is kept
    assert not residuals["c"].any()
    residuals.fold()
    assert residuals["a"].tolist() == [1.0, 0.0, 2.0]
    assert residuals["b"].tolist() == [3.0, 4.0, 0.0, 0.0]
    assert residuals.owner_states() == []


def test_an_owner_of_nothing() -> None:
    part = slice_of("ab", [3, 4])
    residuals, again = residuals_for(part), Residuals()
    set_owner_residual(residuals, part, [(7, 7)])
    residuals.scale(2.0, lambda name: True)
    again.load(residuals.named(), residuals.owner_states())
    again.fold()
    assert not again["a"].any()
    assert not again["b"].any()


def test_saved_scaled_and_loaded() -> None:
    """Runs whose names are chosen are scaled; gaps have no name, and count for nothing."""
    part, other = slice_of("a.b", [3, 2, 4]), slice_of("c", [4])
    residuals, again = residuals_for(slice_of("abc", [3, 4, 4])), Residuals()
    state, alone = set_owner_residual(residuals, part, [(2, 8)]), set_owner_residual(residuals, other, [(0, 2)])
    residuals.state(slice_of("d", [5]))  # never used: not in a checkpoint
    residuals.scale(0.5, lambda name: name in "ab")
    assert alone.residual.tolist() == [1.0, 2.0]
    saved = residuals.owner_states()
    assert len(saved) == 2
    again.load(residuals.named(), saved)
    state.residual.zero_()
    assert again.state(part).residual.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert not again["a"].any()
