"""Which parameters are compressed, how, and when; and how bytes are shared."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thinwire import NoCompression, Policy, Quantize, TopK, compressor, default_compressor, format_spec, ramp
from thinwire.sync.policy import share_bytes

FINAL = "topk:ratio=1/64,bits=2"
BIG = 10_000


def spec_at(policy: Policy, step: int, name: str = "w", numel: int = BIG) -> str:
    return format_spec(policy.compressor_of(name, numel, step)).split(",")[0]


@pytest.mark.parametrize("spec", ["quantize:bits=8", "quantize:bits=4", "none"])
def test_small_ones_go_by_their_own_compressor_whatever_else_is_said(spec: str) -> None:
    layers, warmup = {"*": "quantize:bits=2"}, [(1, "quantize:bits=1")]
    policy = Policy(FINAL, min_numel=100, small_compressor=spec, overrides=layers, warmup=warmup)
    assert Policy(FINAL).small_compressor == compressor("quantize:bits=8")
    assert (policy.is_small("b", 99), policy.is_small("b", 100)) == (True, False)
    for step, other in ((0, "quantize:bits=1"), (1, "quantize:bits=2")):
        assert policy.compressor_of("b", 99, step) == compressor(spec)
        assert policy.compressor_of("b", 100, step) == compressor(other)
    assert isinstance(Policy(FINAL, min_numel=0).compressor_of("b", 1, 0), TopK)


def test_small_ones_go_dense_where_nothing_is_compressed() -> None:
    policy = Policy(FINAL, warmup=[(1, "none"), (1, "quantize:bits=8")])
    kinds = [type(policy.compressor_of("b", 10, step)) for step in range(3)]
    assert kinds == [NoCompression, Quantize, Quantize]
    assert isinstance(Policy("none").compressor_of("b", 10, 0), NoCompression)
    assert isinstance(Policy("none", overrides={"w": FINAL}).compressor_of("b", 10, 0), Quantize)


def test_small_ones_that_are_excluded_go_dense() -> None:
    for policy in (Policy(FINAL, exclude=["b"]), Policy(FINAL, include=["w"]), Policy(FINAL, overrides={"b": "none"})):
        assert policy.is_excluded("b")
        assert not policy.is_small("b", 10)
        assert isinstance(policy.compressor_of("b", 10, 0), NoCompression)


@pytest.mark.parametrize(
    ("include", "exclude", "compressed"),
    [
        (("*",), (), ["body.w", "head.w", "Head.w"]),
        (("*",), ("head.*",), ["body.w", "Head.w"]),
        (("body.*",), (), ["body.w"]),
        (("body.*", "head.*"), ("*.w",), []),
        ((), (), []),
        (("[bh]*",), ("?ody.w",), ["head.w"]),
    ],
)
def test_include_and_exclude(include: Any, exclude: Any, compressed: list[str]) -> None:
    policy = Policy(FINAL, include=include, exclude=exclude, warmup=[(5, "quantize:bits=8")])
    for step in (0, 10):  # in the warm-up too
        found = [
            n for n in ("body.w", "head.w", "Head.w") if isinstance(policy.compressor_of(n, BIG, step), NoCompression)
        ]
        assert found == [name for name in ("body.w", "head.w", "Head.w") if name not in compressed]


def test_the_first_pattern_of_layers_counts() -> None:
    policy = Policy(FINAL, overrides={"head.*": "quantize:bits=8", "*.w": "none", "*": "randomk:ratio=1/8"})
    assert [spec_at(policy, 0, name) for name in ("head.w", "body.w", "body.b")] == [
        "quantize:bits=8",
        "none",
        "randomk:ratio=1/8",
    ]


def test_warm_up_phases() -> None:
    policy = Policy(FINAL, warmup=[(2, "none"), (3, "quantize:bits=8"), *ramp(FINAL, 4, "1/16")])
    found = [spec_at(policy, step) for step in range(11)]
    expected = ["none"] * 2 + ["quantize:bits=8"] * 3 + ["topk:ratio=1/16"] * 2 + ["topk:ratio=1/32"] * 2
    assert found == expected + ["topk:ratio=1/64"] * 2
    assert policy.warmup_steps == 9
    assert [policy.phase(step) for step in (0, 1, 2, 4, 5, 8, 9, 10**9)] == [0, 0, 1, 1, 2, 3, 4, 4]
    assert [policy.is_dense(step) for step in (0, 1, 2, 9)] == [True, True, False, False]


def test_dense_means_all_of_it() -> None:
    assert Policy("none").is_dense(0)
    assert not Policy("none", overrides={"x": FINAL}).is_dense(0)
    assert not Policy(FINAL, overrides={"*": "none"}).is_dense(0)
    assert not Policy("none", warmup=[(1, FINAL)]).is_dense(0)


@pytest.mark.parametrize(
    "options",
    [
        {"compressor": 5},
        {"compressor": None},
        {"compressor": "nonsense"},
        {"compressor": FINAL, "min_numel": -1},
        {"compressor": FINAL, "min_numel": 1.5},
        {"compressor": FINAL, "min_numel": True},
        {"compressor": FINAL, "include": "body.*"},
        {"compressor": FINAL, "include": 5},
        {"compressor": FINAL, "include": [5]},
        {"compressor": FINAL, "exclude": "head.*"},
        {"compressor": FINAL, "exclude": None},
        {"compressor": FINAL, "overrides": ["head.*"]},
        {"compressor": FINAL, "overrides": {"head.*": "nonsense"}},
        {"compressor": FINAL, "overrides": {"head.*": 5}},
        {"compressor": FINAL, "overrides": {5: "none"}},
        {"compressor": FINAL, "warmup": [(0, "none")]},
        {"compressor": FINAL, "warmup": [(-1, "none")]},
        {"compressor": FINAL, "warmup": [(2.0, "none")]},
        {"compressor": FINAL, "warmup": [("none", 2)]},
        {"compressor": FINAL, "warmup": [(2, "nonsense")]},
        {"compressor": FINAL, "warmup": [2]},
        {"compressor": FINAL, "warmup": [(2,)]},
        {"compressor": FINAL, "warmup": 100},
        {"compressor": FINAL, "adapt_every": -1},
        {"compressor": FINAL, "adapt_every": 1.0},
        {"compressor": "quantize:bits=8", "adapt_every": 10},
        {"compressor": "none", "adapt_every": 10},
    ],
    ids=str,
)
def test_wrong_values_are_refused_in_words(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|nonsense|known"):
        Policy(**options)


def test_policies_have_different_descriptions() -> None:
    policies = [
        Policy(FINAL),
        Policy("topk:ratio=1/32,bits=2"),
        Policy(FINAL, min_numel=5),
        Policy(FINAL, include=["a"]),
        Policy(FINAL, exclude=["a"]),
        Policy(FINAL, overrides={"a": "none"}),
        Policy(FINAL, warmup=[(5, "none")]),
        Policy(FINAL, warmup=[(5, "quantize:bits=8")]),
        Policy(FINAL, adapt_every=7),
    ]
    described = [policy.describe() for policy in policies]
    assert all(described.count(one) == 1 for one in described)
    assert Policy(TopK(ratio="1/64", bits=2), include=("*",)).describe() == described[0]


@pytest.mark.parametrize("steps", [4, 5, 7, 100, 1001])
def test_ramp(steps: int) -> None:
    made = ramp(FINAL, steps)
    assert sum(length for length, _ in made) == steps
    assert [str(phase.ratio) for _, phase in made] == ["1/4", "1/8", "1/16", "1/32"]
    assert all(phase.bits == 2 for _, phase in made)
    lengths = [length for length, _ in made]
    assert max(lengths) - min(lengths) <= 1
    assert Policy(FINAL, warmup=made).warmup_steps == steps


def test_ramp_to_a_ratio_that_is_no_power_of_two() -> None:
    assert [str(phase.ratio) for _, phase in ramp("topk:ratio=1/100", 10)] == ["1/4", "1/8", "1/16", "1/32", "1/64"]


@pytest.mark.parametrize(
    ("final", "steps", "start"),
    [(FINAL, 3, "1/4"), (FINAL, 0, "1/4"), (FINAL, -5, "1/4"), (FINAL, 10, "1/64"), (FINAL, 10, "1/100"),
     (FINAL, 2.5, "1/4"), (FINAL, 10, 2), (FINAL, 10, "x"), ("quantize:bits=8", 10, "1/4"), ("none", 10, "1/4")],
)  # fmt: skip
def test_a_ramp_that_cannot_be(final: str, steps: Any, start: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|ratio"):
        ramp(final, steps, start)


SIZES = st.sampled_from([1, 100, 4096, 5000, 40_960, 409_600])
ENERGIES = st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 17.0, 1e6, 1e30, float("inf"), float("nan")])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(SIZES, ENERGIES), min_size=1, max_size=6),
    st.sampled_from(["1/4096", "1/1000", "1/64", "1/16", "1/3", "1"]),
    st.sampled_from([1, 2, 8, 32]),
)
@example([(4096, 1e6), (5000, 1e-12), (409_600, 1e-12)], "1/4096", 32)
def test_shared_bytes_stay_within_the_budget(layers: list[tuple[int, float]], ratio: str, bits: int) -> None:
    base = TopK(ratio=ratio, bits=bits)
    sizes = {str(index): size for index, (size, _) in enumerate(layers)}
    made = share_bytes(base, sizes, {str(index): energy for index, (_, energy) in enumerate(layers)})
    assert made.keys() == sizes.keys()
    budget = sum(base.nbytes(size, torch.float32) for size in sizes.values())
    assert sum(made[name].nbytes(size, torch.float32) for name, size in sizes.items()) <= budget
    for given_ in made.values():
        times = Fraction(given_.ratio) / Fraction(base.ratio)
        assert Fraction(1, 4) <= times <= 4
        assert (given_.bits, given_.chunk) == (base.bits, base.chunk)


def test_larger_residuals_get_more_and_none_starves() -> None:
    base = TopK(ratio="1/64", bits=2)
    sizes = dict.fromkeys("abc", 409_600)
    made = share_bytes(base, sizes, {"a": 1e4, "b": 1.0, "c": 0.0})
    ratios = [Fraction(made[name].ratio) for name in "abc"]
    assert ratios[0] > Fraction(1, 64) > ratios[1] >= ratios[2] == Fraction(1, 256)
    alike = share_bytes(base, sizes, dict.fromkeys("abc", 3.0))
    assert {made.ratio for made in alike.values()} == {Fraction(1, 64)}
    nothing = share_bytes(base, sizes, dict.fromkeys("abc", 0.0))
    assert {made.ratio for made in nothing.values()} == {Fraction(1, 64)}
    assert share_bytes(base, {}, {}) == {}


def test_bytes_are_shared_by_what_an_element_is_behind() -> None:
    """A large layer has a large norm, but its elements are no further behind than those of a small one."""
    sizes = {"large": 1 << 20, "small": 1 << 14, "behind": 1 << 14}
    energies = {"large": 4.0 * sizes["large"], "small": 4.0 * sizes["small"], "behind": 64.0 * sizes["behind"]}
    made = share_bytes(TopK(ratio="1/64", bits=2), sizes, energies)
    assert made["large"].ratio == made["small"].ratio
    assert made["behind"].ratio > made["small"].ratio


def test_who_takes_part_in_the_sharing() -> None:
    policy = Policy(FINAL, adapt_every=10, exclude=["x"], overrides={"head.*": "quantize:bits=8"})
    assert policy.adapts("w", BIG)
    assert not policy.adapts("w", 5)
    assert not policy.adapts("x", BIG)
    assert not policy.adapts("head.w", BIG)
    assert not Policy(FINAL).adapts("w", BIG)
    shared = {"w": TopK(ratio="1/16", bits=2), "head.w": TopK(ratio="1/16", bits=2)}
    assert policy.compressor_of("w", BIG, 0, shared) == shared["w"]
    assert format_spec(policy.compressor_of("head.w", BIG, 0, shared)).startswith("quantize")
    warm = Policy(FINAL, adapt_every=10, warmup=[(5, "none")])
    assert isinstance(warm.compressor_of("w", BIG, 4, shared), NoCompression)
    assert warm.compressor_of("w", BIG, 5, shared) == shared["w"]


def test_default_begins_with_more_once_the_warm_up_is_over() -> None:
    policy = Policy("default", warmup=[(2, "quantize:bits=8")], overrides={"head": "quantize:bits=4"}).for_ranks(8)
    found = [policy.compressor_of("body", 100_000, step) for step in range(2 + 400)]
    assert found[:2] == [Quantize(bits=8)] * 2
    ratios = [str(made.ratio) for made in found[2:] if isinstance(made, TopK)]
    assert ratios == ["1/96"] * 128 + ["1/192"] * 256 + ["1/384"] * 16
    phases = [policy.phase(step) for step in range(2 + 400)]
    assert phases == [0] * 2 + [1] * 128 + [2] * 256 + [3] * 16
    assert {policy.compressor_of("head", 100_000, step) for step in range(2, 402)} == {Quantize(bits=4)}
    assert policy.final == default_compressor(8)


def test_only_the_default_begins_with_more() -> None:
    policy = Policy("topk:ratio=1/64,bits=2", warmup=[(2, "none")])
    assert {policy.compressor_of("body", 100_000, step) for step in range(2, 500)} == {policy.final}
    assert {policy.phase(step) for step in range(2, 500)} == {1}


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 9, 16, 32, 1000])
def test_default_ends_with_its_share_of_the_union(ranks: int) -> None:
    ratios = [Fraction(default_compressor(ranks, step).ratio) for step in range(0, 200_000, 64)]
    assert ratios[0] == max(Fraction(1, 96), Fraction(1, 48 * ranks))
    assert ratios[-1] == Fraction(default_compressor(ranks).ratio) == Fraction(1, 48 * ranks)
    assert ratios == sorted(ratios, reverse=True)
    policy = Policy("default").for_ranks(ranks)
    by_phase = {policy.phase(step): policy.compressor_of("w", 10**6, step) for step in range(0, 200_000, 64)}
    assert list(by_phase) == list(range(len(set(ratios)))), "a phase for each ratio"
    assert [Fraction(made.ratio) for made in by_phase.values() if isinstance(made, TopK)] == list(dict.fromkeys(ratios))
