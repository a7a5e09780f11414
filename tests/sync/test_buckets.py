"""How buckets are cut, and how a plain loop makes them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from thinwire import NoCompression, Quantize, TopK
from thinwire.sync.buckets import _TAKEN_OUT, BUCKET_BYTES, Bucket, Packed, flatten, group_parameters, plan_bucket

DENSE, TOPK, OTHER = NoCompression(), TopK(ratio="1/64"), Quantize(bits=8)
KINDS = [DENSE, TOPK, OTHER]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 10, 5000, _TAKEN_OUT, _TAKEN_OUT + 1]),
            st.integers(0, 2),
            st.integers(0, 1),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
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


def test_neighbours_of_one_kind_are_one_run() -> None:
    plan = plan_bucket("abcd", [5000] * 4, [TOPK, TOPK, OTHER, TOPK], [0] * 4)
    assert [part.names for part in plan.slices] == [("a", "b"), ("c",), ("d",)]
    plan = plan_bucket("abcd", [5000] * 4, [TOPK] * 4, [0, 0, 1, 1])
    assert [part.names for part in plan.slices] == [("a", "b"), ("c", "d")]


def test_a_large_dense_one_ends_a_run() -> None:
    for size, count in ((_TAKEN_OUT, 1), (_TAKEN_OUT + 1, 2)):
        assert len(plan_bucket("abc", [5000, size, 5000], [TOPK, DENSE, TOPK], [0] * 3).slices) == count


def named(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{index}", nn.Parameter(torch.zeros(size, dtype=dtype))) for index, size in enumerate(sizes)]


def test_groups_are_of_one_dtype_and_the_last_come_first() -> None:
    pairs = named(4, 5, 3, 6)
    pairs[2] = ("half", nn.Parameter(torch.zeros(3, dtype=torch.float16)))
    assert [[name for name, _ in group] for group in group_parameters(pairs)] == [["p3", "p1", "p0"], ["half"]]
    assert group_parameters([]) == []


def test_groups_are_limited_and_complete() -> None:
    third = BUCKET_BYTES // 12
    groups = group_parameters(named(third, third, third, third, 3 * third + 10, 1, third))
    assert [[name for name, _ in group] for group in groups] == [["p6", "p5"], ["p4"], ["p3", "p2", "p1"], ["p0"]]


def test_flatten_makes_gradients_views_and_keeps_their_values() -> None:
    pairs = [
        ("w", nn.Parameter(torch.zeros(2, 3))),
        ("s", nn.Parameter(torch.tensor(0.0))),
        ("n", nn.Parameter(torch.zeros(2))),
    ]
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


def test_sparse_gradients_are_refused_by_name_and_nothing_changes() -> None:
    pairs = named(3, 4)
    before = torch.ones(3)
    pairs[0][1].grad = before
    pairs[1][1].grad = torch.ones(4).to_sparse()
    with pytest.raises(ValueError, match=r"'p1'.*sparse.*expected a dense"):
        group_parameters(pairs)
    assert pairs[0][1].grad is before


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="p0"):
        group_parameters([*named(3), *named(4)])


def test_parts_of_a_bucket() -> None:
    bucket = Bucket(torch.arange(5.0), ("a", "b", "c"), (2, 0, 3))
    assert {name: part.tolist() for name, part in bucket.parts().items()} == {"a": [0, 1], "b": [], "c": [2, 3, 4]}
