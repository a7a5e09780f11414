"""How buckets are cut, and how a plain loop makes them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from thinwire import NoCompression, Quantize, TopK
from thinwire.sync.buckets import _TAKEN_OUT, BUCKET_BYTES, Packed, flatten, group_parameters, plan_bucket

DENSE, TOPK, OTHER = NoCompression(), TopK(ratio="1/64"), Quantize(bits=8)
KINDS = [DENSE, TOPK, OTHER]
SIZES = st.sampled_from([0, 1, 10, 5000, _TAKEN_OUT, _TAKEN_OUT + 1])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 2), st.integers(0, 1), st.booleans()), min_size=1, max_size=12))
def test_every_element_is_sent_or_kept(drawn: list[tuple[int, int, int, bool]]) -> None:
    names = [str(index) for index in range(len(drawn))]
    sizes = [size for size, *_ in drawn]
    compressors, families = [KINDS[kind] for _, kind, *_ in drawn], [family for _, _, family, _ in drawn]
    small = {name for name, (*_, is_small) in zip(names, drawn, strict=True) if is_small}
    plan = plan_bucket(names, sizes, compressors, families, small)
    bounds, start = {}, 0
    for name, size in zip(names, sizes, strict=True):
        bounds[name], start = (start, start + size), start + size
    kinds, groups = dict(zip(names, compressors, strict=True)), dict(zip(names, families, strict=True))

    packed = {name for name in names if kinds[name] is DENSE} | small
    expected: dict[object, list[Packed]] = {}
    for name in (name for name in names if name in packed):
        expected.setdefault(kinds[name], []).append(Packed(name, *bounds[name]))
    assert plan.packed == expected
    carried: list[str] = []
    end = 0
    for part in plan.slices:
        assert part.start >= end, "slices overlap"
        end = part.stop
        assert sum(part.sizes) == part.stop - part.start
        assert part.names[0] is not None
        assert part.names[-1] is not None
        at, gaps = part.start, []
        for name, size in zip(part.names, part.sizes, strict=True):
            if name is None:
                gaps.append((at - part.start, at - part.start + size))
                assert any(bounds[other] == (at, at + size) for other in packed)
                assert size <= _TAKEN_OUT
            else:
                assert bounds[name] == (at, at + size)
                assert kinds[name] == part.compressor
                assert groups[name] == part.family
                carried.append(name)
            at += size
        assert part.gaps == gaps
    assert carried == [name for name in names if name not in packed]


def test_neighbours_of_one_kind_are_one_run_that_a_large_dense_one_ends() -> None:
    for kinds, families, expected in (
        ([TOPK, TOPK, OTHER, TOPK], [0] * 4, [("a", "b"), ("c",), ("d",)]),
        ([TOPK] * 4, [0, 0, 1, 1], [("a", "b"), ("c", "d")]),
    ):
        assert [part.names for part in plan_bucket("abcd", [5000] * 4, kinds, families).slices] == expected
    for size, count in ((_TAKEN_OUT, 1), (_TAKEN_OUT + 1, 2)):
        assert len(plan_bucket("abc", [5000, size, 5000], [TOPK, DENSE, TOPK], [0] * 3).slices) == count


def named(*sizes: int) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{index}", nn.Parameter(torch.zeros(size))) for index, size in enumerate(sizes)]


def test_groups_are_of_one_dtype_limited_and_complete_and_the_last_come_first() -> None:
    pairs, third = named(4, 5, 3, 6), BUCKET_BYTES // 12
    pairs[2] = ("half", nn.Parameter(torch.zeros(3, dtype=torch.float16)))
    for given_pairs, expected in (
        ([], []),
        (pairs, [["p3", "p1", "p0"], ["half"]]),
        (
            named(third, third, third, third, 3 * third + 10, 1, third),
            [["p6", "p5"], ["p4"], ["p3", "p2", "p1"], ["p0"]],
        ),
    ):
        assert [[name for name, _ in group] for group in group_parameters(given_pairs)] == expected


def test_flatten_makes_gradients_views_and_keeps_their_values() -> None:
    shapes: dict[str, tuple[int, ...]] = {"w": (2, 3), "s": (), "n": (2,)}
    pairs = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    pairs[0][1].grad = torch.arange(6.0).view(3, 2).t()  # not contiguous
    pairs[1][1].grad = torch.tensor(7.0)
    bucket = flatten(pairs)
    assert bucket.tensor.tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 7.0, 0.0, 0.0]
    assert bucket.names == ("w", "s", "n")
    bucket.tensor.mul_(2)
    assert pairs[0][1].grad.tolist() == [[0.0, 4.0, 8.0], [2.0, 6.0, 10.0]]
    assert pairs[1][1].grad.shape == ()
    assert float(pairs[1][1].grad) == 14.0
    assert pairs[2][1].grad.tolist() == [0.0, 0.0]


def test_sparse_gradients_and_two_parameters_of_one_name_are_refused() -> None:
    pairs, before = named(3, 4), torch.ones(3)
    pairs[0][1].grad, pairs[1][1].grad = before, torch.ones(4).to_sparse()
    with pytest.raises(ValueError, match=r"'p1'.*sparse.*expected a dense"):
        group_parameters(pairs)
    assert pairs[0][1].grad is before
    with pytest.raises(ValueError, match="p0"):
        group_parameters([*named(3), *named(4)])
