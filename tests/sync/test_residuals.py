"""Vectors by name: whatever company they are asked for in, values stay. And residuals of owners."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import Synchronizer, TopK
from thinwire.collectives import LocalWorld
from thinwire.sync.buckets import Slice
from thinwire.sync.residuals import NamedVectors, Residuals

CPU = torch.device("cpu")
SIZES = {"a": 3, "b": 1, "c": 0, "d": 7, "e": 4}


def slice_of(
    vectors: NamedVectors, names: list[str | None], gaps: int = 2, dtype: torch.dtype = torch.float32
) -> Tensor:
    return vectors.slice(names, [gaps if name is None else SIZES[name] for name in names], dtype, CPU)


def test_zero_at_first_and_a_view_from_then_on() -> None:
    vectors = NamedVectors()
    flat = slice_of(vectors, ["a", "b"])
    assert flat.tolist() == [0.0] * 4
    flat.copy_(torch.arange(4.0))
    assert vectors["a"].tolist() == [0.0, 1.0, 2.0]
    assert vectors["b"].tolist() == [3.0]
    assert slice_of(vectors, ["a", "b"]).data_ptr() == flat.data_ptr()
    assert "a" in vectors
    assert "d" not in vectors
    assert list(vectors.named()) == ["a", "b"]


def test_the_size_of_a_gap_counts() -> None:
    """DDP's rebuild may put another bias between the same two weights."""
    vectors = NamedVectors()
    slice_of(vectors, ["a", None, "b"], gaps=2).copy_(torch.tensor([1.0, 2, 3, 9, 9, 4]))
    assert sorted(vectors.named()) == ["a", "b"]
    assert slice_of(vectors, ["a", None, "b"], gaps=5).tolist() == [1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0]
    assert slice_of(vectors, ["b", None, "a"]).tolist() == [4.0, 0.0, 0.0, 1.0, 2.0, 3.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.permutations(list(SIZES)).flatmap(lambda p: st.integers(1, 5).map(lambda n: p[:n])), max_size=8))
def test_any_companies(companies: list[list[str]]) -> None:
    """Against a dict of plain tensors."""
    vectors, expected = NamedVectors(), {name: torch.zeros(size) for name, size in SIZES.items()}
    for number, names in enumerate(companies):
        flat = slice_of(vectors, list(names))
        assert torch.equal(flat, torch.cat([expected[name] for name in names]))
        flat.add_(torch.arange(flat.numel()) + 10.0 * number + 1)
        for name, part in zip(names, flat.split([SIZES[name] for name in names]), strict=True):
            expected[name] = part.clone()
        for name in vectors.named():
            assert torch.equal(vectors[name], expected[name]), name


def test_short_dtypes_are_kept_in_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert slice_of(NamedVectors(), ["a"], dtype=dtype).dtype == wide


def test_a_parameter_of_another_size_is_refused_and_changes_nothing() -> None:
    vectors = NamedVectors()
    slice_of(vectors, ["a"]).fill_(1.0)
    with pytest.raises(ValueError, match=r"'a' has 4 elements.* 3.*another model"):
        vectors.slice(["d", "a"], [7, 4], torch.float32, CPU)
    assert vectors["a"].tolist() == [1.0] * 3
    assert "d" not in vectors


def test_load_copies_and_replaces_everything() -> None:
    vectors, saved = NamedVectors(), {"d": torch.ones(7), "a": torch.arange(3.0)}
    slice_of(vectors, ["b"]).fill_(1.0)
    vectors.load(saved)
    saved["d"].fill_(9.0)
    assert sorted(vectors.named()) == ["a", "d"]
    assert slice_of(vectors, ["a", "d", "b"]).tolist() == [0.0, 1.0, 2.0] + [1.0] * 7 + [0.0]


def test_scale_reaches_chosen_names_once() -> None:
    vectors = NamedVectors()
    slice_of(vectors, ["a", "b"]).fill_(1.0)
    slice_of(vectors, ["d"]).fill_(1.0)
    slice_of(vectors, ["b", "d"])
    vectors.load(vectors.named())
    vectors.scale(0.5, lambda name: name != "b")
    assert {name: set(vectors[name].tolist()) for name in vectors.named()} == {"a": {0.5}, "b": {1.0}, "d": {0.5}}


def test_threads_may_ask_at_the_same_time() -> None:
    """Optimizers ask from the threads of the collectives, bucket by bucket."""
    companies = [[f"{number}.{index}" for index in range(6)] for number in range(100)]

    def work(mine: list[list[str]], vectors: NamedVectors) -> None:
        for names in mine:
            first, second = (vectors.slice(names, [4] * 6, torch.float32, CPU) for _ in range(2))
            assert first.data_ptr() == second.data_ptr(), "a slice was lost"
            first.fill_(1.0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(15):
            vectors = NamedVectors()
            with ThreadPoolExecutor(4) as threads:
                started = [threads.submit(work, companies[index::4], vectors) for index in range(4)]
                for one in started:
                    one.result(30)
            kept = {vectors.slice(names, [4] * 6, torch.float32, CPU).data_ptr() for names in companies}
            assert len(kept) == 100
            assert all(float(vectors[name].sum()) == 4.0 for names in companies for name in names)
    finally:
        sys.setswitchinterval(interval)


# Residuals of owners: kept by slice, and given back to the parameters when a slice changes ----------------------------

TOPK, OTHER = TopK(ratio="1/64"), TopK(ratio="1/32")


def owned_slice(names: str, sizes: list[int], compressor: TopK = TOPK) -> Slice:
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
        "no gap": owned_slice("ab", [3, 4]),
        "one alone": owned_slice("b", [4]),
        "another compressor": owned_slice("a.b", [3, 2, 4], OTHER),
        "another gap": owned_slice("a.b", [3, 5, 4]),
    }.items():
        part = owned_slice("a.b", [3, 2, 4])
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
    residuals = residuals_for(owned_slice("a.b", [3, 2, 4]))
    state = set_owner_residual(residuals, owned_slice("a", [3]), [(0, 3)])
    residuals.state(owned_slice("b", [4]))
    assert residuals.state(owned_slice("a", [3])) is state
    assert not residuals["a"].any()


def test_fold_gives_everything_back_once_of_the_names_that_are_given() -> None:
    part, other = owned_slice("ab", [3, 4]), owned_slice("c", [2])
    residuals = residuals_for(owned_slice("abc", [3, 4, 2]))
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
    part = owned_slice("ab", [3, 4])
    residuals, again = residuals_for(part), Residuals()
    set_owner_residual(residuals, part, [(7, 7)])
    residuals.scale(2.0, lambda name: True)
    again.load(residuals.named(), residuals.owner_states())
    again.fold()
    assert not again["a"].any()
    assert not again["b"].any()


def test_saved_scaled_and_loaded() -> None:
    """Runs whose names are chosen are scaled; gaps have no name, and count for nothing."""
    part, other = owned_slice("a.b", [3, 2, 4]), owned_slice("c", [4])
    residuals, again = residuals_for(owned_slice("abc", [3, 4, 4])), Residuals()
    state, alone = set_owner_residual(residuals, part, [(2, 8)]), set_owner_residual(residuals, other, [(0, 2)])
    residuals.state(owned_slice("d", [5]))  # never used: not in a checkpoint
    residuals.scale(0.5, lambda name: name in "ab")
    assert alone.residual.tolist() == [1.0, 2.0]
    saved = residuals.owner_states()
    assert len(saved) == 2
    again.load(residuals.named(), saved)
    state.residual.zero_()
    assert again.state(part).residual.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert not again["a"].any()


def test_shares_of_residuals_stay_the_same_when_members_leave() -> None:
    group: Any = LocalWorld(4).groups[0]
    sync = Synchronizer("topk:ratio=1/8", group=group)
    sync.unsent.slice(["a"], [5], torch.float32, CPU).fill_(1.0)
    assert sync.world_size == 4
    group.size = 2  # as that of an `ElasticGroup` whose members leave
    sync.follow_group(4)
    assert (sync.world_size, sync.residuals["a"].tolist()) == (2, [0.5] * 5)
