"""What is advised: the simplest way that is about as quick as any, and nothing at all where that is right."""

from dataclasses import replace

import pytest
from plan_cases import COSTLY, EIGHT, FREE, MADE, TOPK, case

from thinwire.tools.plan.advice import WORTH, advise, choose, pays_below
from thinwire.tools.plan.model import Case, Prediction
from thinwire.tools.plan.ways import DENSE, HALVES, Way, ways


def predictions(given: Case) -> list[Prediction]:
    return [given.predict(way) for way in ways(MADE, given.cluster)]


def chosen(given: Case) -> Way:
    return choose(given, predictions(given), MADE).way


def test_a_slow_link_asks_for_the_fewest_bytes() -> None:
    given = case(speeds=COSTLY, rate=1e8)
    way = chosen(given)
    assert way.spec == TOPK
    first, code, *others = advise(given, predictions(given), MADE)
    assert first.startswith(f"Use {TOPK} by ")
    assert f'thinwire.AdamW(ddp, lr=..., compressor="{TOPK}"' in code
    assert any(line.startswith("It pays on links below about ") for line in others)
    assert any("loss is not predicted" in line for line in others)


def test_a_fast_link_asks_for_nothing() -> None:
    given = case(speeds=COSTLY.by_accelerator(), rate=1e12)
    assert chosen(given).spec == DENSE
    first, *others = advise(given, predictions(given), MADE)
    assert first.startswith("Do not compress: a dense step takes ")
    assert others[0].startswith("Compression would pay on links below about ")


def test_in_between_sixteen_bits_do() -> None:
    """Where the half of the bytes is hidden behind the backward pass, nothing else is worth its price."""
    given = case(200_000_000, 2.0, FREE, rate=6e9)
    assert chosen(given).spec in HALVES
    first, code, *_ = advise(given, predictions(given), MADE)
    assert first.startswith("Use fp16 hook: ")
    assert "ddp.register_comm_hook(None, " in code


def test_eight_bits_come_before_a_sixty_fourth() -> None:
    found = []
    for rate in (1e8, 3e9, 1e12):
        given = case(200_000_000, 2.0, FREE, rate=rate)
        found.append(chosen(given).spec)
    assert found == [TOPK, EIGHT, DENSE]


def test_memory_and_bytes_are_told() -> None:
    given = case(speeds=COSTLY, rate=1e8)
    first = advise(given, predictions(given), MADE)[0]
    dense = given.predict(Way(DENSE, "ring"))
    assert "of memory" in first
    assert f"not {dense.footprint.sent / 1e6:.0f} MB" in first


def test_up_to_which_bandwidth_it_pays() -> None:
    given = case(speeds=COSTLY)
    way = Way(TOPK, "gather", False, "thinwire.AdamW")
    limit = pays_below(given, way)
    assert limit is not None
    for factor, pays in ((0.9, True), (1.1, False)):
        there = replace(given, cluster=given.cluster.at(rate=factor * limit))
        assert (there.seconds(Way(DENSE, "ring")) >= WORTH * there.seconds(way)) is pays


def test_what_never_pays() -> None:
    slow = replace(COSTLY, codecs=COSTLY.faster(1e-9, "").codecs)
    assert pays_below(case(speeds=slow), Way(TOPK, "gather", False, "thinwire.AdamW")) is None


@pytest.mark.parametrize("world", [4, 64])
def test_the_algorithm_is_named_unless_it_is_what_auto_takes(world: int) -> None:
    given = case(speeds=COSTLY, rate=1e7, world=world)
    way, lines = chosen(given), advise(given, predictions(given), MADE)
    assert way.algorithm == ("gather" if world == 4 else "sharded")
    assert "algorithm=" not in lines[1]
