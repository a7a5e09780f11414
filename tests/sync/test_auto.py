"""The choice of "auto", from numbers; and which steps try what."""

import json
from dataclasses import replace
from math import nan

import pytest

from thinwire import Policy, Synchronizer
from thinwire.collectives.handle import Handle, Report, Span
from thinwire.compressors import Compressor, format_spec
from thinwire.sync import trials as trials_module
from thinwire.sync.auto import GRADIENTS, MARGIN, BucketTimes, Choice, Measured, confirm, decide, updates
from thinwire.sync.parts import Mode, StepRecord
from thinwire.sync.trials import BEFORE, STEPS, TURNS, Auto, schedule

UPDATES = updates(2)
"""What two ranks may send updates by."""

NONE, EIGHT, TOPK = (format_spec(one) for one in UPDATES)
NAMES = (("c",), ("b",), ("a",))


def measured(
    steps: tuple[float, ...], *held: tuple[float, ...], ready: tuple[float, ...] = (0.0, 1.0, 2.0)
) -> Measured:
    specs = (NONE, EIGHT, TOPK)[: len(steps)]
    buckets = (BucketTimes(names, at, times) for names, at, times in zip(NAMES, ready, held, strict=False))
    return Measured(specs, steps, tuple(buckets))


def trials_of(compressors: tuple[Compressor, ...], warmup: int = 0) -> Auto:
    return Auto(Policy("auto", warmup=[(warmup, "none")] if warmup else ()), None, compressors)


def chosen(choice: Choice) -> list[str]:
    return [bucket.compressor for bucket in choice.buckets]


@pytest.mark.parametrize("dense", [0.5, 1.0, MARGIN])
def test_dense_is_kept_unless_something_is_clearly_faster(dense: float) -> None:
    choice = decide(measured((dense, 1.0), (9.0, 0.1)))
    assert chosen(choice) == [NONE]
    assert "no step is clearly faster than dense" in choice.reason


@pytest.mark.parametrize(
    ("steps", "best"), [((10.0, 4.0, 1.0), TOPK), ((10.0, 1.0, 4.0), EIGHT), ((9.0, 1.0, 1.0), EIGHT)]
)
def test_the_fastest_step_wins_and_of_equals_the_denser(steps: tuple[float, ...], best: str) -> None:
    held = tuple(one - 0.5 for one in steps)
    assert chosen(decide(measured(steps, held))) == [best]


def test_a_bucket_that_is_hidden_stays_dense() -> None:
    """The first has been exchanged before the gradients of the second are there."""
    choice = decide(measured((12.0, 5.0), (0.9, 0.3), (10.0, 3.0)))
    assert chosen(choice) == [NONE, EIGHT]
    assert choice.is_mixed
    assert [bucket.reason for bucket in choice.buckets] == ["denser at no cost in time", "as in the fastest step"]


def test_a_bucket_that_hides_itself_and_delays_the_next_does_not() -> None:
    choice = decide(measured((12.0, 5.0), (2.9, 0.3), (10.0, 3.0)))
    assert chosen(choice) == [EIGHT, EIGHT]


def test_if_the_link_does_not_explain_it_the_whole_step_decides() -> None:
    assert chosen(decide(measured((12.0, 5.0), (0.1, 0.1), (0.1, 0.1)))) == [EIGHT, EIGHT]


def test_what_was_not_measured_is_not_trusted() -> None:
    assert chosen(decide(measured((12.0, nan), (2.0, 1.0)))) == [NONE]
    assert chosen(decide(measured((0.0, 1.0), (2.0, 1.0)))) == [NONE]
    assert chosen(decide(measured((12.0, 5.0), (0.1, 0.1), (10.0, nan)))) == [EIGHT, EIGHT]


def test_a_mixture_is_kept_only_if_it_is_as_quick() -> None:
    numbers = measured((12.0, 5.0), (0.9, 0.3), (10.0, 3.0))
    mixed = decide(numbers)
    assert confirm(mixed, numbers, 5.1) is mixed
    assert chosen(confirm(mixed, numbers, 5.2)) == [EIGHT, EIGHT]
    assert chosen(confirm(mixed, numbers, nan)) == [EIGHT, EIGHT]


def test_a_choice_survives_json_and_can_be_read() -> None:
    choice = decide(measured((12.0, 5.0), (0.9, 0.3), (10.0, 3.0)))
    assert Choice.of_record(json.loads(json.dumps(choice.record()))) == choice
    assert "quantize:bits=8 has the fastest step (none 12,000.0 ms, quantize:bits=8 5,000.0 ms)" in choice.describe()
    assert {name: format_spec(one) for name, one in choice.compressors.items()} == {"c": NONE, "b": EIGHT}


def test_every_compressor_has_its_turns_and_sparse_ones_come_last() -> None:
    order = schedule(UPDATES)
    assert [order.count(number) for number in range(3)] == [TURNS * STEPS] * 3
    assert set(order[-TURNS * STEPS :]) == {2}
    assert schedule(GRADIENTS)[:STEPS] == [0] * STEPS


def test_trials_come_after_the_warm_up_and_after_ddp_has_its_buckets() -> None:
    for warmup, start in ((0, BEFORE), (10, 10)):
        trials = trials_of(GRADIENTS, warmup)
        assert trials.assigned(start - 1, ["a"]) == {}
        assert trials.assigned(start, ["a"]) == {"a": GRADIENTS[0]}
        assert trials.assigned(start + STEPS, ["a"]) == {"a": GRADIENTS[1]}
        assert trials.end == start + 2 * TURNS * STEPS


def test_gradients_are_tried_before_updates() -> None:
    trials = trials_of(UPDATES, 5)
    tried = [trials.tries_gradients(step) for step in range(5, trials.end)]
    assert tried == [True] * 2 * TURNS * STEPS + [False] * TURNS * STEPS


def test_a_mixture_gets_a_turn_of_its_own() -> None:
    trials, layout = trials_of(GRADIENTS), [("c",), ("b",)]
    end = trials.end
    trials.decide([12.0, 5.0, 0.0, 0.9, 0.3, 1.0, 10.0, 3.0], layout)
    assert trials.choice is None
    assert trials.end == end + STEPS
    assert {name: format_spec(one) for name, one in trials.assigned(end, "bc").items()} == {"c": NONE, "b": EIGHT}
    restored = trials_of(GRADIENTS)
    restored.load_state_dict(trials.state_dict(), same_world=True)
    for one in (trials, restored):
        one.decide([9.0], layout)
        assert one.choice is not None
        assert chosen(one.choice) == [EIGHT, EIGHT]


class Clock:
    """Time that stands still until a test sets it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_the_quicker_turn_of_dense_and_the_slower_one_of_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, trials = Clock(), trials_of(GRADIENTS)
    monkeypatch.setattr(trials_module, "time", clock)
    turns = [1.0, 5.0, 3.0, 7.0]  # dense, 8 bits, dense, 8 bits
    for step in range(trials.end + 1):
        trials.begins(step)
        place = step - BEFORE
        first = place % STEPS == 0
        clock.now += 100.0 if first or place < 0 else turns[min(place // STEPS, 3)]
    assert trials.numbers([]) == [1.0, 7.0], "the first step of a turn does not count"


def record_of(step: int, held: float) -> StepRecord:
    """A step with two buckets, of which the second is ready after half a second and sends three times the bytes."""
    record = StepRecord(number=step, mode=Mode.GRADIENTS, updates=None, flushes=False)
    for number, sent in enumerate((100, 300)):
        report = Report("gather", "", bytes_sent=sent, spans=[Span("exchange", 0.0, held)])
        record.handles.append(Handle(report))
        record.marks.append((NAMES[number], 0.5 * number, number, number + 1))
    return record


def test_the_time_of_the_link_is_divided_by_the_bytes_of_buckets() -> None:
    trials = trials_of(GRADIENTS)
    for step in range(trials.end):
        trials.ended(record_of(step, held=4.0 if step < BEFORE + STEPS else 2.0))
    _, _, first_ready, *first, second_ready, none, eight = trials.numbers(NAMES[:2])
    assert (first_ready, second_ready) == (0.0, 0.5)
    assert first == [0.25 * 3.0, 0.25 * 2.0], "the median of both turns of dense, and that of 8 bits"
    assert (none, eight) == (0.75 * 3.0, 0.75 * 2.0)


def test_trials_that_were_saved_in_the_middle_end_with_the_same_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(trials_module, "time", clock)
    whole, resumed, half = trials_of(GRADIENTS), trials_of(GRADIENTS), BEFORE + 6
    for step in range(whole.end + 1):
        if step == half:
            saved = json.loads(json.dumps(whole.state_dict()))
            resumed.load_state_dict(saved, same_world=True)
        for trials in (whole, resumed) if step >= half else (whole,):
            trials.begins(step)
            trials.ended(record_of(step, held=1.0 + step))
        clock.now += 1.0 + step % 3
    names = NAMES[:2]
    assert whole.numbers(names)[2:] == resumed.numbers(names)[2:]
    assert all(number == number for number in resumed.numbers(names)), "all is measured"


def test_measuring_again_goes_on_as_before_for_one_step() -> None:
    trials = trials_of(GRADIENTS)
    trials.decide([12.0, 5.0, 0.0, 9.0, 3.0], [("a",)])
    assert trials.choice is not None
    trials.load_state_dict({**trials.state_dict(), "steps": 100, "entries": {"a": 1}}, same_world=False)
    assert trials.choice is None
    assert [trials.assigned(step, ["a"])["a"] for step in (100, 101)] == [GRADIENTS[1], GRADIENTS[0]]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="compressor 'auto' in 'auto' is unknown"):
        Policy("none", overrides={"head.*": "auto"})
    with pytest.raises(ValueError, match="compressor 'auto' in 'auto' is unknown"):
        Synchronizer("topk:ratio=1/64", shard_compressor="auto")
    with pytest.raises(ValueError, match="compressor 'automatic' in 'automatic' is unknown"):
        Synchronizer("automatic")


def test_a_policy_keeps_the_word() -> None:
    policy = replace(Policy("auto", min_numel=10), warmup=[(3, "quantize:bits=8")])
    assert policy.auto
    assert policy.describe()["compressor"] == "auto"
    assert policy.is_dense(3)
    assert not policy.is_dense(3, {"w": GRADIENTS[1]})
    policy.check_order()
