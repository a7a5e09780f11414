"""What owners owe: kept by run, and given back to the parameters when a run changes."""

from typing import Any

import pytest
import torch

from thinwire import TopK
from thinwire.sync.buckets import Run
from thinwire.sync.owners import Owners
from thinwire.sync.residuals import NamedVectors

CPU, TOPK, OTHER = torch.device("cpu"), TopK(ratio="1/64"), TopK(ratio="1/32")


def run_of(names: str, sizes: list[int], compressor: TopK = TOPK) -> Run:
    """A dot is a gap."""
    kept = tuple(None if name == "." else name for name in names)
    return Run(0, sum(sizes), compressor, None, kept, tuple(sizes))


def vectors_for(run: Run) -> NamedVectors:
    vectors = NamedVectors()
    vectors.slice(run.names, run.sizes, torch.float32, CPU)
    return vectors


def owe(owners: Owners, run: Run, vectors: NamedVectors, spans: list[tuple[int, int]]) -> Any:
    """Let this rank own some elements, and owe 1, 2, 3 ... for them."""
    state = owners.state(run, vectors)
    residual = state.prepare(spans, torch.float32, CPU)
    residual.copy_(torch.arange(1.0, residual.numel() + 1))
    return state


def test_the_same_run_has_the_same_state() -> None:
    owners, run = Owners(), run_of("a.b", [3, 2, 4])
    vectors = vectors_for(run)
    state = owe(owners, run, vectors, [(2, 8)])
    assert owners.state(run_of("a.b", [3, 2, 4]), vectors) is state
    assert not vectors["a"].any()


@pytest.mark.parametrize(
    "other",
    [run_of("ab", [3, 4]), run_of("b", [4]), run_of("a.b", [3, 2, 4], OTHER), run_of("a.b", [3, 5, 4])],
    ids=["no gap", "one alone", "another compressor", "another gap"],
)
def test_what_is_owed_by_another_run_goes_to_the_parameters(other: Run) -> None:
    owners, run = Owners(), run_of("a.b", [3, 2, 4])
    vectors = vectors_for(run)
    vectors["b"].fill_(10.0)
    owe(owners, run, vectors, [(2, 8)])
    state = owners.state(other, vectors)
    assert state.residual is None
    assert vectors["a"].tolist() == [0.0, 0.0, 1.0]
    assert vectors["b"].tolist() == [14.0, 15.0, 16.0, 10.0]  # 2 and 3 were the gap's, which is nobody's
    assert owners.state(other, vectors) is state
    assert vectors["b"].tolist() == [14.0, 15.0, 16.0, 10.0]


def test_strangers_are_left_alone() -> None:
    owners, one, two = Owners(), run_of("a", [3]), run_of("b", [4])
    vectors = vectors_for(run_of("ab", [3, 4]))
    state = owe(owners, one, vectors, [(0, 3)])
    owners.state(two, vectors)
    assert owners.state(one, vectors) is state
    assert not vectors["a"].any()


def test_fold_gives_everything_back_once() -> None:
    owners, run = Owners(), run_of("ab", [3, 4])
    vectors = vectors_for(run)
    owe(owners, run, vectors, [(0, 1), (2, 5)])
    owners.fold(vectors)
    owners.fold(vectors)
    assert vectors["a"].tolist() == [1.0, 0.0, 2.0]
    assert vectors["b"].tolist() == [3.0, 4.0, 0.0, 0.0]
    assert owners.state_dict() == []


def every(name: str) -> bool:
    return True


def test_an_owner_of_nothing() -> None:
    owners, run = Owners(), run_of("ab", [3, 4])
    vectors = vectors_for(run)
    owe(owners, run, vectors, [(7, 7)])
    owners.scale(2.0, every)
    again = Owners()
    again.load_state_dict(owners.state_dict())
    again.fold(vectors)
    assert not vectors["a"].any()
    assert not vectors["b"].any()


def test_saved_scaled_and_loaded() -> None:
    owners, run = Owners(), run_of("a.b", [3, 2, 4])
    vectors = vectors_for(run)
    state = owe(owners, run, vectors, [(2, 8)])
    owners.state(run_of("c", [5]), vectors)  # never used: not in a checkpoint
    owners.scale(0.5, every)
    saved = owners.state_dict()
    assert len(saved) == 1
    again = Owners()
    again.load_state_dict(saved)
    state.residual.zero_()
    loaded = again.state(run, vectors)
    assert loaded.residual.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert not vectors["a"].any()


def test_only_runs_whose_names_are_chosen_are_scaled() -> None:
    """Gaps have no name, and count for nothing."""
    owners, one, two = Owners(), run_of("a.b", [3, 2, 4]), run_of("c", [4])
    vectors = vectors_for(run_of("abc", [3, 4, 4]))
    first, second = owe(owners, one, vectors, [(0, 2)]), owe(owners, two, vectors, [(0, 2)])
    owners.scale(4.0, lambda name: name in "ab")
    assert first.residual.tolist() == [4.0, 8.0]
    assert second.residual.tolist() == [1.0, 2.0]
