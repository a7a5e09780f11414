"""Local steps in the plan, rule by rule: times that can be worked out by hand, and when they are recommended."""

from dataclasses import replace

import pytest

from support.plan_cases import COSTLY, FREE, MADE, TOPK, case
from thinwire.tools.plan.local import HOPELESS, LocalPrediction, advise_local, choose_local, pays_from, predict_local
from thinwire.tools.plan.methods import methods_for
from thinwire.tools.plan.model import Case, Prediction


def predictions(given: Case) -> list[Prediction]:
    return [given.predict(method) for method in methods_for(MADE, nccl=given.cluster.nccl)]


def chosen(given: Case) -> LocalPrediction | None:
    return choose_local(given, predictions(given), predict_local(given, MADE))


def far(**changes: object) -> Case:
    """Two ranks, 0.1 s of computing in a step, and a latency of 1 s; codec and bytes cost nothing."""
    return case(1_000_000, 0.1, FREE, **{"world": 2, "rate": 1e15, "latency": 1.0, **changes})


def test_an_exchange_is_paid_once_in_a_round() -> None:
    eight, many = predict_local(far(), MADE)
    assert (eight.every, many.every) == (8, 32)
    assert eight.waiting == pytest.approx(0.1 + 1.0 / 8, rel=1e-3)
    assert many.waiting == pytest.approx(0.1 + 1.0 / 32, rel=1e-3)
    assert eight.sent == pytest.approx(4 * many.sent)
    assert eight.spec == TOPK, "the fewest bytes"


def test_a_delay_hides_the_network_and_no_more_than_a_round() -> None:
    eight, many = predict_local(far(), MADE)
    assert (eight.delay, many.delay) == (8, 11)  # 1 s and a little is 11 steps of 0.1 s, or all that a round has
    assert eight.overlapped == pytest.approx(0.1 + (1.0 - 0.8) / 8, rel=1e-3)
    assert many.overlapped == pytest.approx(0.1, rel=1e-3)
    (near, _) = predict_local(far(latency=0.01), MADE)
    assert near.delay == 1


def test_the_codec_is_not_hidden() -> None:
    slow = far(latency=0.0)
    slow = replace(slow, speeds=replace(FREE, codecs=COSTLY.faster(1e-2, "").codecs))
    (eight, _) = predict_local(slow, MADE)
    assert eight.overlapped == pytest.approx(eight.waiting)
    assert eight.overlapped > 0.1


def test_they_are_recommended_only_where_sending_every_step_is_hopeless() -> None:
    for latency, is_hopeless in ((0.0, False), (0.06, False), (0.15, True), (1.0, True)):
        given = far(latency=latency)
        fastest = min(one.seconds for one in predictions(given))
        assert (fastest >= HOPELESS * 0.1) is is_hopeless, latency
        assert (chosen(given) is not None) is is_hopeless, latency


def test_they_are_not_recommended_if_they_are_hardly_faster() -> None:
    """Where the codec is what is slow, and local steps take more than half of what the fastest method takes."""
    slow = far(latency=0.0)
    slow = replace(slow, speeds=replace(FREE, codecs=COSTLY.faster(1e-3, "").codecs))
    found = predict_local(slow, MADE)
    nearly = [replace(one, overlapped=0.6 * min(each.seconds for each in predictions(slow))) for one in found]
    assert min(each.seconds for each in predictions(slow)) < HOPELESS * nearly[0].overlapped
    assert choose_local(slow, predictions(slow), nearly) is None


def test_the_shortest_round_that_is_about_as_fast() -> None:
    found = chosen(far(latency=0.3))
    assert found is not None
    assert found.every == 8, "all of it is hidden in both"
    found = chosen(far(latency=2.0))
    assert found is not None
    assert found.every == 32, "eight steps hide too little"


def test_the_advice_names_the_algorithm_and_what_to_write() -> None:
    given = far(latency=0.3)
    first, code, last = advise_local(given, predictions(given), predict_local(given, MADE))
    assert first.startswith("Sending every step is hopeless here: the fastest method (")
    assert "another algorithm, whose loss differs: docs/local-steps.md" in first
    assert 'every=8, compressor="topk:ratio=1/64,bits=2", delay=4, model=model)' in code
    assert last.startswith("If it has to be")
    near = far(latency=0.0)
    assert advise_local(near, predictions(near), predict_local(near, MADE)) == []


def test_from_where_on_they_would_pay() -> None:
    """Without a latency the fastest method takes 0.1 s; it takes twice that where the latency is 0.1 s or so."""
    given = far(latency=0.0)
    (line,) = pays_from(given, predictions(given), MADE)
    assert "links below about " in line
    assert "a latency above about " in line
    limit = float(line.partition("a latency above about ")[2].split()[0]) / 1e3
    assert 0.05 < limit < 0.15
    for factor, is_hopeless in ((0.8, False), (1.25, True)):
        assert (chosen(far(latency=factor * limit)) is not None) is is_hopeless
    hopeless = far()
    assert pays_from(hopeless, predictions(hopeless), MADE) == []


def test_none_for_a_sharded_model_or_too_little_memory() -> None:
    sharded = replace(far(), shard=8)
    assert predict_local(sharded, MADE) == []
    assert pays_from(sharded, predictions(sharded), MADE) == []
    need = 16 * 1_000_000
    assert chosen(far(memory=float(need + 15_000_000))) is None, "12 bytes for each parameter, and 4 of the residual"
    assert chosen(far(memory=float(need + 18_000_000))) is not None
