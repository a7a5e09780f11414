"""The simulation: it agrees with the closed form where that holds, sees what that cannot, and reaches thousands."""

import pytest
from plan_cases import COSTLY, FREE, MADE, PLAIN, TOPK, case

from thinwire.tools.plan.costs import Speeds
from thinwire.tools.plan.host import Host
from thinwire.tools.plan.simulate import simulate
from thinwire.tools.plan.ways import DENSE, Way, ways

SHARDED = Way(TOPK, "sharded", False, "thinwire.AdamW")
ALL = [*ways(MADE, PLAIN), *(way for way in ways(MADE, case(ranks_per_host=4).cluster) if way.in_hosts)]


@pytest.mark.parametrize("speeds", [FREE, COSTLY], ids=lambda speeds: speeds.origin)
@pytest.mark.parametrize("rate", [1e8, 1e10, 1e12])
@pytest.mark.parametrize("way", ALL, ids=lambda way: f"{way.name} {way.shown_algorithm}")
def test_it_agrees_with_the_closed_form(way: Way, rate: float, speeds: Speeds) -> None:
    """To the digit where an operation has one transfer and nothing after it; else others come in between."""
    given = case(speeds=speeds, rate=rate, latency=1e-5, ranks_per_host=4 if way.in_hosts else 1)
    expected = given.seconds(way)
    once = way.spec == DENSE or (way.algorithm == "gather" and not way.in_hosts)
    near = 1e-9 if once else 0.15 if way.in_hosts else 0.03
    assert simulate(given, way, Host()).seconds == pytest.approx(expected, rel=near)


@pytest.mark.parametrize("way", ALL[:7], ids=lambda way: f"{way.name} {way.algorithm}")
def test_it_agrees_where_a_processor_is_shared(way: Way) -> None:
    given = case(speeds=COSTLY, rate=1e9, latency=1e-5, codec_slows=1.0, wire_slows=1.0)
    assert simulate(given, way, Host()).seconds == pytest.approx(given.seconds(way), rel=0.03)


def test_thousands_of_ranks() -> None:
    """7 G parameters on 4,096 ranks: a thousand buckets, each of which passes every link."""
    given = case(7_000_000_000, 2.0, COSTLY, world=4096, ranks_per_host=8, rate=1e11)
    way = Way(TOPK, "sharded", True, "thinwire.AdamW")
    alike, found = (simulate(given, way, Host(8, jitter=jitter, per_switch=32)) for jitter in (0.0, 0.05))
    assert found.events > 5 * len(given.work.buckets) > 5000
    assert alike.seconds == pytest.approx(given.seconds(way), rel=0.03)
    assert found.seconds > alike.seconds


def test_the_slowest_rank_is_waited_for() -> None:
    given = case(speeds=FREE, rate=1e12)
    alike = simulate(given, SHARDED, Host()).seconds
    small, large = (simulate(case(rate=1e12, world=world), SHARDED, Host(jitter=0.05)).seconds for world in (2, 2048))
    assert alike < large
    assert small < large, "of more ranks the slowest is slower"
    assert large < 1.3 * alike


def test_a_switch_that_carries_less_slows_what_passes_it() -> None:
    given = case(world=64, rate=1e6)
    one = simulate(given, SHARDED, Host()).seconds
    enough = simulate(given, SHARDED, Host(per_switch=8)).seconds
    scarce = simulate(given, SHARDED, Host(per_switch=8, oversubscription=4)).seconds
    assert one == pytest.approx(enough)
    # 56 of 63 peers are elsewhere, and for those there is a quarter
    assert scarce == pytest.approx(one * 4 * 56 / 63, rel=0.05)
    ring = [simulate(given, Way(DENSE, "ring"), Host(per_switch=8, oversubscription=o)).seconds for o in (1, 4, 16)]
    assert ring[0] == ring[1], "of eight hosts one sends to another switch: a quarter is plenty"
    assert ring[2] == pytest.approx(2 * ring[0], rel=0.05)


def test_the_same_seed_is_the_same_step() -> None:
    given = case(speeds=COSTLY)
    found = [simulate(given, SHARDED, Host(jitter=0.1), seed).seconds for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
