"""Residuals of owners: kept by slice, and given back to the parameters when a slice changes."""

from typing import Any

import pytest
import torch

from thinwire import TopK
from thinwire.sync.buckets import Slice
from thinwire.sync.owners import Owners
from thinwire.sync.residuals import NamedVectors

CPU, TOPK, OTHER = torch.device("cpu"), TopK(ratio="1/64"), TopK(ratio="1/32")


def slice_of(names: str, sizes: list[int], compressor: TopK = TOPK) -> Slice:
    """A dot is a gap."""
    kept = tuple(None if name == "." else name for name in names)
    return Slice(0, sum(sizes), compressor, None, kept, tuple(sizes))


def vectors_for(part: Slice) -> NamedVectors:
    vectors = NamedVectors()
    vectors.slice(part.names, part.sizes, torch.float32, CPU)
    return vectors


def set_owner_residual(owners: Owners, part: Slice, vectors: NamedVectors, spans: list[tuple[int, int]]) -> Any:
    """Let this rank own some elements, with the residuals 1, 2, 3 and so on."""
    state = owners.state(part, vectors)
    residual = state.prepare(spans, torch.float32, CPU)
    residual.copy_(torch.arange(1.0, residual.numel() + 1))
    return state


def test_the_same_run_has_the_same_state() -> None:
    owners, part = Owners(), slice_of("a.b", [3, 2, 4])
    vectors = vectors_for(part)
    state = set_owner_residual(owners, part, vectors, [(2, 8)])
    assert owners.state(slice_of("a.b", [3, 2, 4]), vectors) is state
    assert not vectors["a"].any()


@pytest.mark.parametrize(
    "other",
    [slice_of("ab", [3, 4]), slice_of("b", [4]), slice_of("a.b", [3, 2, 4], OTHER), slice_of("a.b", [3, 5, 4])],
    ids=["no gap", "one alone", "another compressor", "another gap"],
)
def test_residuals_of_another_slice_go_to_the_parameters(other: Slice) -> None:
    owners, part = Owners(), slice_of("a.b", [3, 2, 4])
    vectors = vectors_for(part)
    vectors["b"].fill_(10.0)
    set_owner_residual(owners, part, vectors, [(2, 8)])
    state = owners.state(other, vectors)
    assert state.residual is None
    assert vectors["a"].tolist() == [0.0, 0.0, 1.0]
    assert vectors["b"].tolist() == [14.0, 15.0, 16.0, 10.0]  # 2 and 3 were the gap's, which no parameter has
    assert owners.state(other, vectors) is state
    assert vectors["b"].tolist() == [14.0, 15.0, 16.0, 10.0]


def test_strangers_are_left_alone() -> None:
    owners, one, two = Owners(), slice_of("a", [3]), slice_of("b", [4])
    vectors = vectors_for(slice_of("ab", [3, 4]))
    state = set_owner_residual(owners, one, vectors, [(0, 3)])
    owners.state(two, vectors)
    assert owners.state(one, vectors) is state
    assert not vectors["a"].any()


def test_fold_gives_everything_back_once() -> None:
    owners, part = Owners(), slice_of("ab", [3, 4])
    vectors = vectors_for(part)
    set_owner_residual(owners, part, vectors, [(0, 1), (2, 5)])
    owners.fold(vectors)
    owners.fold(vectors)
    assert vectors["a"].tolist() == [1.0, 0.0, 2.0]
    assert vectors["b"].tolist() == [3.0, 4.0, 0.0, 0.0]
    assert owners.state_dict() == []


def every(name: str) -> bool:
    return True


def test_an_owner_of_nothing() -> None:
    owners, part = Owners(), slice_of("ab", [3, 4])
    vectors = vectors_for(part)
    set_owner_residual(owners, part, vectors, [(7, 7)])
    owners.scale(2.0, every)
    again = Owners()
    again.load_state_dict(owners.state_dict())
    again.fold(vectors)
    assert not vectors["a"].any()
    assert not vectors["b"].any()


def test_saved_scaled_and_loaded() -> None:
    owners, part = Owners(), slice_of("a.b", [3, 2, 4])
    vectors = vectors_for(part)
    state = set_owner_residual(owners, part, vectors, [(2, 8)])
    owners.state(slice_of("c", [5]), vectors)  # never used: not in a checkpoint
    owners.scale(0.5, every)
    saved = owners.state_dict()
    assert len(saved) == 1
    again = Owners()
    again.load_state_dict(saved)
    state.residual.zero_()
    loaded = again.state(part, vectors)
    assert loaded.residual.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert not vectors["a"].any()


def test_only_runs_whose_names_are_chosen_are_scaled() -> None:
    """Gaps have no name, and count for nothing."""
    owners, one, two = Owners(), slice_of("a.b", [3, 2, 4]), slice_of("c", [4])
    vectors = vectors_for(slice_of("abc", [3, 4, 4]))
    first, second = (set_owner_residual(owners, part, vectors, [(0, 2)]) for part in (one, two))
    owners.scale(4.0, lambda name: name in "ab")
    assert first.residual.tolist() == [4.0, 8.0]
    assert second.residual.tolist() == [1.0, 2.0]
