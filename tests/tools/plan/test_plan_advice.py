"""What is advised: the simplest method that is about as fast as any, local steps where sending every step is hopeless,
and nothing at all where that is right.
"""

from dataclasses import replace

import pytest

from support.plan_cases import COSTLY, EIGHT, FREE, MADE, TOPK, case, predictions, slower
from thinwire.tools.plan.local import HOPELESS, advise_local, predict_local
from thinwire.tools.plan.methods import BF16, DENSE, FP16, Method
from thinwire.tools.plan.model import Case
from thinwire.tools.plan.show import WORTH, advise, choose, limit

ADAMW, ATTACH = f"thinwire.AdamW {TOPK}", f"attach {EIGHT}"


def chosen(given: Case) -> str:
    found = choose(predictions(given))
    assert found is not None
    return found.method.name


def test_slow_link_asks_for_the_fewest_bytes() -> None:
    given = case(speeds=COSTLY, rate=1e8)
    assert chosen(given) == ADAMW
    first, code, *others = advise(given, predictions(given))
    assert first.startswith(f"Use {ADAMW} (sharded): ")
    assert f"in place of {given.predict(Method(DENSE)).sent / 1e6:.0f} MB" in first
    assert f'thinwire.AdamW(ddp, lr=..., compressor="{TOPK}")' in code
    assert any(line.startswith("It pays on links below about ") for line in others)
    assert any("of memory. Its loss is not predicted" in line for line in others)


def test_fast_link_asks_for_nothing() -> None:
    given = case(speeds=COSTLY, rate=1e12)
    assert chosen(given) == DENSE
    first, *others = advise(given, predictions(given))
    assert first.startswith("Do not compress: a dense step takes ")
    assert others[0].startswith("Compression would pay on links below about ")


def test_half_the_bytes_are_enough_in_between() -> None:
    """Where the other half is hidden behind the backward pass, nothing else is worth its price."""
    for cores, name in ((1, FP16), (None, BF16)):
        given = case(200_000_000, 2.0, FREE, rate=6e9, cores=cores)
        assert chosen(given) == name
        first, code, *_ = advise(given, predictions(given))
        assert first.startswith(f"Use {name}: ")
        assert "ddp.register_comm_hook(None, " in code
    found = predictions(replace(given, shard=8))
    assert "MixedPrecisionPolicy" in advise(replace(given, shard=8), found)[1]


def test_eight_bits_come_before_a_sixty_fourth() -> None:
    found = [chosen(case(200_000_000, 2.0, FREE, rate=rate)) for rate in (1e8, 3e9, 1e12)]
    assert found == [ADAMW, ATTACH, DENSE]


def test_method_pays_up_to_the_bandwidth_that_is_named() -> None:
    given, method = case(speeds=COSTLY), Method(ADAMW, MADE[TOPK])
    (line,) = limit(given, method, "It pays")
    number, unit = line.partition("below about ")[2].split()[:2]
    rate = float(number) * {"Mbit/s": 1e6, "Gbit/s": 1e9}[unit]
    for factor, pays in ((0.9, True), (1.1, False)):
        there = given.at(rate=factor * rate)
        assert (there.seconds(Method(DENSE)) >= WORTH * there.seconds(method)) is pays
    assert limit(case(speeds=slower(1e9)), method, "It pays") == [], "never"


def test_method_that_does_not_fit_is_not_recommended() -> None:
    """Dense fits exactly, and so does half of the bytes; a residual does not."""
    need = 16 * 50_000_000
    slow = case(speeds=COSTLY, rate=1e8)
    assert chosen(slow) == ADAMW
    assert chosen(replace(slow, memory=need)) == BF16
    fast = replace(case(speeds=COSTLY, rate=1e12), memory=need)
    assert chosen(fast) == DENSE
    none = replace(slow, memory=1e6)
    assert choose(predictions(none)) is None
    (line,) = advise(none, predictions(none))
    assert "not even dense, which needs 800 MB" in line
    assert "--shard 1024)" in line


def far(**changes: object) -> Case:
    """Two ranks, 0.1 s of computing in a step, and a latency of 1 s; codec and bytes cost nothing."""
    return case(1_000_000, 0.1, **{"speeds": FREE, "world": 2, "rate": 1e15, "latency": 1.0, **changes})  # type: ignore[arg-type]


def test_local_steps_pay_for_an_exchange_once_in_a_round() -> None:
    """A delay hides the network, at most as many steps as a round has; the codec is not hidden."""
    (eight, delay, seconds, sent), (many, longer, short, few) = predict_local(far(), TOPK, MADE[TOPK])
    assert (eight, many, delay, longer) == (8, 32, 8, 11)  # 1 s and a little is 11 steps of 0.1 s
    assert seconds == pytest.approx(0.1 + (1.0 - 0.8) / 8, rel=1e-3)
    assert short == pytest.approx(0.1, rel=1e-3)
    assert sent == pytest.approx(4 * few)
    near, _ = predict_local(far(latency=0.01), TOPK, MADE[TOPK])
    assert near[1] == 1
    codec = slower(100)
    bound, _ = predict_local(far(latency=0.0, speeds=codec), TOPK, MADE[TOPK])
    costs = codec.codecs[MADE[TOPK]]
    assert bound[2] == pytest.approx(0.1 + 1e6 * (costs.encode + costs.commit + costs.decode(2)) / 8, rel=0.05)


def test_local_steps_are_recommended_only_where_sending_every_step_is_hopeless() -> None:
    for latency, is_hopeless in ((0.0, False), (0.06, False), (0.15, True), (1.0, True)):
        given = far(latency=latency)
        found = predictions(given)
        assert (min(one.seconds for one in found) >= HOPELESS * 0.1) is is_hopeless, latency
        assert bool(advise_local(given, found, MADE)) is is_hopeless, latency
    slow = far(latency=0.0, speeds=slower(1e5))  # for their codec, they take long themselves
    fastest = predict_local(slow, TOPK, MADE[TOPK])[1][2]
    assert fastest > 0.2
    for factor, pays in ((1.9, False), (2.1, True)):
        found = [replace(one, seconds=factor * fastest) for one in predictions(slow)]
        assert bool(advise_local(slow, found, MADE)) is pays, factor


def test_shortest_round_that_is_about_as_fast_is_recommended() -> None:
    for latency, every in ((0.3, 8), (2.0, 32)):
        given = far(latency=latency)
        first, code, last = advise_local(given, predictions(given), MADE)
        assert first.startswith("Sending every step is hopeless here: the fastest method (")
        assert "another algorithm, whose loss differs: docs/local-steps.md" in first
        assert f'every={every}, compressor="{TOPK}", delay=' in code
        assert last.startswith("If it has to be")


def test_no_local_steps_for_a_sharded_model_or_too_little_memory() -> None:
    sharded = replace(far(), shard=8)
    assert advise_local(sharded, predictions(sharded), MADE) == []
    need = 16 * 1_000_000
    for room, is_enough in ((15_000_000, False), (18_000_000, True)):  # 12 bytes for each parameter, 4 of the residual
        given = replace(far(), memory=need + room)
        assert bool(advise_local(given, predictions(given), MADE)) is is_enough, room
