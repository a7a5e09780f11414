"""Which parameters are compressed, how, and when."""

from fractions import Fraction
from typing import Any

import pytest

from thinwire import NoCompression, Policy, Quantize, TopK, compressor, default_compressor, format_spec, ramp

FINAL = "topk:ratio=1/64,bits=2"
BIG = 10_000


def spec_at(policy: Policy, step: int, name: str = "w", numel: int = BIG) -> str:
    return format_spec(policy.compressor_of(name, numel, step)).split(",")[0]


def test_small_ones_go_by_their_own_compressor_whatever_else_is_said() -> None:
    layers, warmup = {"*": "quantize:bits=2"}, [(1, "quantize:bits=1")]
    assert Policy(FINAL).small_compressor == compressor("quantize:bits=8")
    for spec in ("quantize:bits=8", "quantize:bits=4", "none"):
        policy = Policy(FINAL, min_numel=100, small_compressor=spec, overrides=layers, warmup=warmup)
        assert (policy.is_small("b", 99), policy.is_small("b", 100)) == (True, False)
        for step, other in ((0, "quantize:bits=1"), (1, "quantize:bits=2")):
            assert policy.compressor_of("b", 99, step) == compressor(spec)
            assert policy.compressor_of("b", 100, step) == compressor(other)
    assert isinstance(Policy(FINAL, min_numel=0).compressor_of("b", 1, 0), TopK)


def test_small_ones_go_dense_where_nothing_is_compressed_or_they_are_excluded() -> None:
    policy = Policy(FINAL, warmup=[(1, "none"), (1, "quantize:bits=8")])
    kinds = [type(policy.compressor_of("b", 10, step)) for step in range(3)]
    assert kinds == [NoCompression, Quantize, Quantize]
    assert isinstance(Policy("none").compressor_of("b", 10, 0), NoCompression)
    assert isinstance(Policy("none", overrides={"w": FINAL}).compressor_of("b", 10, 0), Quantize)
    for policy in (Policy(FINAL, exclude=["b"]), Policy(FINAL, include=["w"]), Policy(FINAL, overrides={"b": "none"})):
        assert policy.is_excluded("b")
        assert not policy.is_small("b", 10)
        assert isinstance(policy.compressor_of("b", 10, 0), NoCompression)


def test_include_and_exclude() -> None:
    names = ("body.w", "head.w", "Head.w")
    for include, exclude, compressed in (
        (("*",), (), names),
        (("*",), ("head.*",), ("body.w", "Head.w")),
        (("body.*",), (), ("body.w",)),
        (("body.*", "head.*"), ("*.w",), ()),
        ((), (), ()),
        (("[bh]*",), ("?ody.w",), ("head.w",)),
    ):
        policy = Policy(FINAL, include=include, exclude=exclude, warmup=[(5, "quantize:bits=8")])
        for step in (0, 10):  # in the warm-up too
            kinds = {name: policy.compressor_of(name, BIG, step) for name in names}
            found = tuple(name for name, kind in kinds.items() if not isinstance(kind, NoCompression))
            assert found == compressed, (include, exclude)


def test_the_first_pattern_of_layers_counts() -> None:
    policy = Policy(FINAL, overrides={"head.*": "quantize:bits=8", "*.w": "none", "*": "randomk:ratio=1/8"})
    for name, spec in (("head.w", "quantize:bits=8"), ("body.w", "none"), ("body.b", "randomk:ratio=1/8")):
        assert spec_at(policy, 0, name) == spec


def test_warm_up_phases_and_a_dense_one_is_dense_in_all_parameters() -> None:
    policy = Policy(FINAL, warmup=[(2, "none"), (3, "quantize:bits=8"), *ramp(FINAL, 4, "1/16")])
    found = [spec_at(policy, step) for step in range(11)]
    expected = ["none"] * 2 + ["quantize:bits=8"] * 3 + ["topk:ratio=1/16"] * 2 + ["topk:ratio=1/32"] * 2
    assert found == expected + ["topk:ratio=1/64"] * 2
    assert policy.warmup_steps == 9
    assert [policy.phase(step) for step in (0, 1, 2, 4, 5, 8, 9, 10**9)] == [0, 0, 1, 1, 2, 3, 4, 4]
    assert [policy.way(step).is_dense for step in (0, 1, 2, 9)] == [True, True, False, False]
    assert Policy("none").way(0).is_dense
    assert not Policy("none", overrides={"x": FINAL}).way(0).is_dense
    assert not Policy(FINAL, overrides={"*": "none"}).way(0).is_dense
    assert not Policy("none", warmup=[(1, FINAL)]).way(0).is_dense


WRONG: dict[str, list[Any]] = {
    "compressor": [5, None, "nonsense"],
    "small_compressor": ["topk:ratio=1/4"],
    "min_numel": [-1, 1.5, True],
    "include": ["body.*", 5, [5]],
    "exclude": ["head.*", None],
    "overrides": [["head.*"], {"head.*": "nonsense"}, {"head.*": 5}, {5: "none"}],
    "warmup": [100, [2], [(2,)], [(0, "none")], [(-1, "none")], [(2.0, "none")], [("none", 2)], [(2, "nonsense")]],
}


def test_wrong_values_are_refused_in_words() -> None:
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(ValueError, match=r"expected|nonsense|known"):
                pytest.fail(f"{name} {value}: {Policy(**{'compressor': FINAL, name: value})}")
    with pytest.raises(ValueError, match=r"adapt_every=10 .*overrides"):
        Policy(FINAL, adapt_every=10)  # type: ignore[arg-type]


def test_policies_have_different_descriptions() -> None:
    others: list[dict[str, Any]] = [
        {"compressor": "topk:ratio=1/32,bits=2"}, {"min_numel": 5}, {"include": ["a"]}, {"exclude": ["a"]},
        {"overrides": {"a": "none"}}, {"warmup": [(5, "none")]}, {"warmup": [(5, "quantize:bits=8")]},
    ]  # fmt: skip
    described = [Policy(**{"compressor": FINAL, **options}).describe() for options in ({}, *others)]
    assert all(described.count(one) == 1 for one in described)
    assert Policy(TopK(ratio="1/64", bits=2), include=("*",)).describe() == described[0]


def test_ramp() -> None:
    for steps in (4, 5, 7, 100, 1001):
        made = ramp(FINAL, steps)
        assert [str(phase.ratio) for _, phase in made] == ["1/4", "1/8", "1/16", "1/32"]
        assert all(phase.bits == 2 for _, phase in made)
        lengths = [length for length, _ in made]
        assert sum(lengths) == steps
        assert max(lengths) - min(lengths) <= 1
        assert Policy(FINAL, warmup=made).warmup_steps == steps
    no_power_of_two = ramp("topk:ratio=1/100", 10)
    assert [str(phase.ratio) for _, phase in no_power_of_two] == ["1/4", "1/8", "1/16", "1/32", "1/64"]


def test_a_ramp_that_cannot_be() -> None:
    for final, steps, start in (
        (FINAL, 3, "1/4"), (FINAL, 0, "1/4"), (FINAL, -5, "1/4"), (FINAL, 10, "1/64"), (FINAL, 10, "1/100"),
        (FINAL, 2.5, "1/4"), (FINAL, 10, 2), (FINAL, 10, "x"), ("quantize:bits=8", 10, "1/4"), ("none", 10, "1/4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"expected|ratio"):
            pytest.fail(f"{final} {steps} {start}: {ramp(final, steps, start)}")  # type: ignore[arg-type]


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
    fixed = Policy("topk:ratio=1/64,bits=2", warmup=[(2, "none")])
    assert {fixed.compressor_of("body", 100_000, step) for step in range(2, 500)} == {fixed.final}
    assert {fixed.phase(step) for step in range(2, 500)} == {1}


def test_default_ends_with_its_share_of_the_union() -> None:
    steps = range(0, 200_000, 64)
    for ranks in (2, 3, 4, 5, 7, 8, 9, 16, 32, 1000):
        ratios = [Fraction(default_compressor(ranks, step).ratio) for step in steps]
        assert ratios[0] == max(Fraction(1, 96), Fraction(1, 48 * ranks))
        assert ratios[-1] == Fraction(default_compressor(ranks).ratio) == Fraction(1, 48 * ranks)
        assert ratios == sorted(ratios, reverse=True)
        policy = Policy("default").for_ranks(ranks)
        by_phase = {policy.phase(step): policy.compressor_of("w", 10**6, step) for step in steps}
        assert list(by_phase) == list(range(len(set(ratios)))), f"{ranks} ranks: a phase for each ratio"
        found = [Fraction(made.ratio) for made in by_phase.values() if isinstance(made, TopK)]
        assert found == list(dict.fromkeys(ratios))
