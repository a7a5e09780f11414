"""The choice of "auto", from numbers; and which steps try what."""

import json
from math import nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire import AdamW, Collective, Policy, Synchronizer
from thinwire.collectives import LocalWorld
from thinwire.compressors import Compressor, format_spec
from thinwire.sync import auto
from thinwire.sync.auto import BEFORE, GRADIENTS, MARGIN, STEPS, TURNS, Choice, Trials, decide, schedule, updates
from thinwire.sync.policy import Way
from thinwire.sync.slots import Peers

UPDATES = updates(2)
"""What two ranks may send updates by."""
SPECS = NONE, EIGHT, TOPK = tuple(map(format_spec, UPDATES))


def trials_of(compressors: tuple[Compressor, ...], warmup: int = 0) -> Trials:
    peers = Peers(LocalWorld(1).groups[0], None)
    return Trials(peers, warmup_steps=warmup, of_updates=compressors == UPDATES)


def way(trials: Trials, step: int, warmup: int = 0) -> Way:
    policy = Policy("auto", warmup=[(warmup, "none")] if warmup else ())
    return policy.way(step, trials.chosen_at(step), is_trial=trials.choice is None)


def tried(trials: Trials, step: int, numel: int = 10_000, warmup: int = 0) -> str:
    return format_spec(way(trials, step, warmup).compressor_of("a", numel))


DENSE_STAYS, NOT_MEASURED = "no step is clearly faster than dense", "not every compressor could be measured"


@pytest.mark.parametrize(
    ("best", "reason", "several"),
    [
        (NONE, DENSE_STAYS, [(0.5, 1.0), (1.0, 1.0), (MARGIN, 1.0)]),
        (EIGHT, "fastest", [(1.01 * MARGIN, 1.0), (10.0, 1.0, 4.0), (9.0, 1.0, 1.0)]),
        (TOPK, "fastest", [(10.0, 4.0, 1.0)]),
        (NONE, NOT_MEASURED, [(12.0, nan), (nan, 1.0), (0.0, 1.0)]),
    ],
)
def test_the_fastest_step_wins_if_it_is_clearly_faster(best: str, reason: str, several: list[Any]) -> None:
    for steps in several:
        choice = decide(SPECS[: len(steps)], steps)
        assert choice.compressor == best, steps
        assert reason in choice.reason, steps


def test_a_choice_survives_json_and_can_be_read() -> None:
    choice = decide(SPECS[:2], (12.0, 5.0))
    assert Choice.of_record(json.loads(json.dumps(choice.record()))) == choice
    text = "quantize:bits=8 has the fastest step (none 12,000.0 ms, quantize:bits=8 5,000.0 ms)"
    assert choice.describe() == f"auto: {text}"
    with pytest.raises(ValueError, match=r"randomk:ratio=1/8"):
        Choice.of_record({**choice.record(), "compressor": "randomk:ratio=1/8"})


def test_every_compressor_has_its_turns_and_updates_come_last() -> None:
    order = schedule(UPDATES)
    assert [order.count(number) for number in range(3)] == [TURNS * STEPS] * 3
    assert set(order[-TURNS * STEPS :]) == {2}
    assert schedule(GRADIENTS)[:STEPS] == [0] * STEPS
    trials = trials_of(UPDATES, 5)
    found = [way(trials, step, 5).by_gradients for step in range(5, trials.end)]
    assert found == [True] * 2 * TURNS * STEPS + [False] * TURNS * STEPS


def test_trials_come_after_the_warm_up_and_after_ddp_has_its_buckets() -> None:
    for warmup, start in ((0, BEFORE), (10, 10)):
        trials = trials_of(GRADIENTS, warmup)
        steps = start - 1, start, start + STEPS
        assert [tried(trials, step, warmup=warmup) for step in steps] == [NONE, NONE, EIGHT]
        assert tried(trials, start + STEPS, 10, warmup) == NONE, "small tensors are dense until the choice"
        assert trials.end == start + 2 * TURNS * STEPS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Time that stands still until a test sets it."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(auto, "time", clock)
    return clock


def test_the_quicker_turn_of_dense_and_the_slower_one_of_others_count(clock: Any) -> None:
    trials = trials_of(GRADIENTS)
    turns = [1.0, 5.0, 3.0, 7.0]  # dense, 8 bits, dense, 8 bits
    for step in range(trials.end + 1):
        trials.begins(step)
        place = step - BEFORE
        first = place % STEPS == 0
        clock.now += 100.0 if first or place < 0 else turns[min(place // STEPS, 3)]
    assert trials.seconds() == [1.0, 7.0], "the first step of a turn does not count"


def test_trials_that_were_saved_in_the_middle_end_with_the_same_measurements(clock: Any) -> None:
    whole, resumed, half = trials_of(GRADIENTS), trials_of(GRADIENTS), BEFORE + TURNS * STEPS
    for step in range(whole.end + 1):
        if step == half:
            saved = json.loads(json.dumps({"steps": half, **whole.state_dict()}))
            resumed.load_state_dict(saved, same_world=True)
        for trials in (whole, resumed) if step >= half else (whole,):
            trials.begins(step)
        clock.now += 10.0 - (step - BEFORE) // STEPS
    assert whole.seconds() == resumed.seconds()
    assert resumed.seconds()[1] > resumed.seconds()[0], "the first turn of 8 bits, which was saved, was slower"


def test_another_world_size_measures_again_unless_updates_were_sent() -> None:
    for compressors, best, expected in (
        (GRADIENTS, 1, None), (UPDATES, 0, None), (UPDATES, 1, EIGHT), (UPDATES, 2, TOPK),
    ):  # fmt: skip
        saved, resumed = (trials_of(compressors) for _ in range(2))
        specs = tuple(map(format_spec, compressors))
        saved.choice = decide(specs, [1.0 if number == best else 2.0 for number in range(len(specs))])
        resumed.load_state_dict({**saved.state_dict(), "steps": 100}, same_world=False)
        assert (resumed.choice and resumed.choice.compressor) == expected, (specs, best)
        assert tried(resumed, 100 + BEFORE) == (expected or NONE)
        assert (resumed.end > 100) == (expected is None)


def test_measurements_of_another_world_size_do_not_count() -> None:
    """In the middle of the trials of updates there is no way back, so these end, and dense is chosen."""
    saved, resumed = (trials_of(UPDATES) for _ in range(2))
    saved._turns = {number: [[1.0]] for number in range(3)}
    step = saved.end - 2
    resumed.load_state_dict({**saved.state_dict(), "steps": step}, same_world=False)
    assert resumed.end == saved.end
    assert tried(resumed, step) == TOPK
    assert decide(SPECS, resumed.seconds()).compressor == NONE


def test_one_rank_measures_nothing() -> None:
    """A process without a group, too."""
    trials = trials_of(UPDATES)
    trials.choose_if_due(0, torch.device("cpu"))
    assert trials.choice is not None
    assert (trials.choice.compressor, trials.choice.step_seconds) == (NONE, [])
    assert "there is one rank" in trials.choice.reason


def test_what_makes_no_sense_is_refused() -> None:
    sparse = Policy("auto", warmup=[(3, "quantize:bits=8"), (4, "topk:ratio=1/4")])
    with pytest.raises(ValueError, match=r"before auto.*remove the sparse phases"):
        AdamW(torch.nn.Linear(3, 3), compressor=sparse)
    for make, word in (
        (lambda: Policy("none", overrides={"head.*": "auto"}), "auto"),
        (lambda: Collective(shard_compressor="auto"), "auto"),
        (lambda: Synchronizer("automatic"), "automatic"),
    ):
        with pytest.raises(ValueError, match=f"compressor '{word}' in '{word}' is unknown"):
            make()
