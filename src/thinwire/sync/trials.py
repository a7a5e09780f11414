"""The trials of `compressor="auto"`: each compressor sends some of the first steps, and is timed.

    step     0 1 | 2 3 4 5 | 6 7 8 9 | ...                        two steps in which DDP builds its buckets
    sent by      |  none   |quantize |  none   |quantize |        then turns; for optimizers two of topk at the end

The first step of a turn is not timed, because it makes plans and may compile kernels. The time of a step is that from
its first bucket to the first bucket of the next step. So it includes everything: waiting, encoding during the backward
pass, and the optimizer. The median of a turn counts. Of two turns, the quicker one counts for dense, and the slower one
for the other compressors. So a moment in which the machine or the network is slow may cost a gain, but seldom makes
training slower than dense.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from math import nan
from statistics import median
from typing import Any

from ..compressors import Compressor, format_spec
from ..compressors import compressor as parsed
from .auto import BucketTimes, Choice, Measured, confirm, decide
from .parts import StepRecord

BEFORE = 2
"""Number of steps after which DDP has rebuilt its buckets."""
TURNS, STEPS = 2, 4
"""Number of turns of each compressor, and number of steps in a turn."""


def schedule(compressors: Sequence[Compressor]) -> list[int]:
    """Return the number of the compressor of each step of the trials.

    Sparse compressors come last, because going back from updates to gradients has a cost.

    >>> from thinwire.sync.auto import updates
    >>> "".join(map(str, schedule(updates(2))))
    '000011110000111122222222'
    """
    dense = [number for number, one in enumerate(compressors) if not one.sparse]
    sparse = [number for number, one in enumerate(compressors) if one.sparse]
    return [number for order in (dense, sparse) for _ in range(TURNS) for number in order for _ in range(STEPS)]


class Trials:
    """The compressor of each step, the measurements, and finally the choice.

    compressors   the compressors to try, the densest first.
    start        the first step of the trials, or `BEFORE` if that is later.
    """

    def __init__(self, compressors: Sequence[Compressor], start: int) -> None:
        self.compressors, self._schedule = tuple(compressors), schedule(compressors)
        self.choice: Choice | None = None
        """The choice; None until it is made."""
        self._begin_at(max(BEFORE, start), {})

    def _begin_at(self, start: int, previous: Mapping[str, Compressor]) -> None:
        """Discard all measurements, and begin trials at step `start`.

        previous   compressors by parameter until then; a parameter without one is dense.
        """
        self._start, self._previous = start, dict(previous)
        self._measured: Measured | None = None
        self._mixture: Choice | None = None
        """The mixture that is tried after all compressors, if there is one."""
        self._steps: dict[int, list[list[float]]] = {}
        """Seconds of the steps of each turn, by compressor; the mixture has the number after the last one."""
        self._held: dict[tuple[str, ...], dict[int, list[float]]] = {}
        self._ready: dict[tuple[str, ...], list[float]] = {}
        self._open: tuple[int, float] | None = None
        """The step under way, and the time at which it began."""
        self._uniform: dict[str, Compressor] = {}

    def again(self, step: int, names: Collection[str]) -> None:
        """Measure again, for example with another number of ranks.

        The given step keeps its compressors, which leaves one step for preparation. The trials begin with the next
        step.
        """
        assigned = self.assigned(step, names)
        self.choice = None
        self._begin_at(step + 1, assigned)

    @property
    def end(self) -> int:
        """Return the first step after the trials."""
        return self._start + len(self._schedule) + (STEPS if self._mixture is not None else 0)

    def is_due(self, step: int) -> bool:
        """Return whether the choice must be made before this step."""
        return self.choice is None and step >= self.end

    def assigned(self, step: int, names: Collection[str]) -> dict[str, Compressor]:
        """Return the compressor of each of these parameters at a step; the same object as long as nothing changes."""
        if self.choice is not None:
            return self.choice.compressors
        number = self._number(step)
        if number is None:
            return self._previous
        if number == len(self.compressors):
            assert self._mixture is not None
            return self._mixture.compressors
        if len(self._uniform) != len(names) or next(iter(self._uniform.values()), None) is not self.compressors[number]:
            self._uniform = dict.fromkeys(names, self.compressors[number])
        return self._uniform

    def tries_gradients(self, step: int) -> bool:
        """Return whether an optimizer sends gradients instead of updates at this step.

        It does if the step tries a compressor that is not sparse: from gradients to updates is easy, but not back.
        """
        number = None if self.choice is not None else self._number(step)
        return number is not None and number < len(self.compressors) and not self.compressors[number].sparse

    def is_timed(self, step: int) -> bool:
        """Return whether a time measurement begins or ends with this step."""
        return self.choice is None and step > self._start

    def begins(self, step: int) -> None:
        """Stop the time of the previous step, and start that of a step whose first bucket is ready."""
        now = time.perf_counter()
        if self._open is not None and step == self._open[0] + 1:  # otherwise that step was skipped
            self._add_step(self._open[0], now - self._open[1])
        self._open = (step, now) if self.choice is None else None

    def ended(self, step: StepRecord) -> None:
        """Record the times of each bucket, after all buckets of a step were exchanged."""
        number = None if self.choice is not None else self._number(step.number)
        if number is None or number == len(self.compressors) or self._is_first(step.number):
            return
        if step.is_sent_by_torch and any(handle.ended is None for handle in step.handles):
            return  # an operation has not ended yet
        began, busy, until = step.marks[0][1], 0.0, 0.0
        for _, issued, first, last in step.marks:
            end = max(_end_of(step, first, last) or issued, until)
            busy, until = busy + max(0.0, end - max(issued, until)), end
        # Buckets that are exchanged at the same time share the link, so its busy time is divided by their bytes.
        sent = [sum(one.report.bytes_sent for one in step.handles[a:b]) for _, _, a, b in step.marks]
        for (names, issued, _, _), mine in zip(step.marks, sent, strict=True):
            self._held.setdefault(names, {}).setdefault(number, []).append(busy * mine / max(1, sum(sent)))
            self._ready.setdefault(names, []).append(issued - began)

    def numbers(self, layout: Sequence[tuple[str, ...]]) -> list[float]:
        """Return the measurements of this rank, to be averaged over ranks; NaN where nothing was measured."""
        if self._mixture is not None:
            return [self._step_seconds(len(self.compressors))]
        found = [self._step_seconds(number) for number in range(len(self.compressors))]
        for names in layout:
            held = self._held.get(names, {})
            found.append(median(self._ready.get(names, [nan])))
            found += [median(held.get(number, [nan])) for number in range(len(self.compressors))]
        return found

    def decide(self, averages: Sequence[float], layout: Sequence[tuple[str, ...]]) -> None:
        """Make the choice, or begin the trial of a mixture.

        averages   the means over ranks of `numbers`.
        """
        if self._mixture is not None:
            assert self._measured is not None
            self.choice = confirm(self._mixture, self._measured, averages[0])
            return
        count = len(self.compressors)
        rows = [averages[count + (count + 1) * row :][: count + 1] for row in range(len(layout))]
        self._measured = Measured(
            tuple(map(format_spec, self.compressors)),
            tuple(averages[:count]),
            tuple(BucketTimes(names, row[0], tuple(row[1:])) for names, row in zip(layout, rows, strict=True)),
        )
        made = decide(self._measured)
        if made.is_mixed:
            self._mixture = made
        else:
            self.choice = made

    def choose_dense(self, reason: str) -> None:
        """Choose dense without measuring."""
        self.choice = Choice(tuple(map(format_spec, self.compressors)), (), reason, ())

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the choice and all measurements, so that a run resumed in the middle of its trials can finish them."""
        return {
            "start": self._start,
            "previous": {name: format_spec(one) for name, one in self._previous.items()},
            "choice": None if self.choice is None else self.choice.record(),
            "mixture": None if self._mixture is None else self._mixture.record(),
            "measured": None if self._measured is None else _record(self._measured),
            "steps": {number: [list(turn) for turn in turns] for number, turns in self._steps.items()},
            "held": [[list(names), dict(held)] for names, held in self._held.items()],
            "ready": [[list(names), list(ready)] for names, ready in self._ready.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self._begin_at(int(state["start"]), {name: parsed(spec) for name, spec in state["previous"].items()})
        self.choice = None if state["choice"] is None else Choice.of_record(state["choice"])
        self._mixture = None if state["mixture"] is None else Choice.of_record(state["mixture"])
        self._measured = None if state["measured"] is None else _of_record(state["measured"])
        self._steps = {int(number): [list(turn) for turn in turns] for number, turns in state["steps"].items()}
        self._held = {tuple(names): {int(n): list(s) for n, s in held.items()} for names, held in state["held"]}
        self._ready = {tuple(names): list(ready) for names, ready in state["ready"]}

    # The place of a step in the trials.

    def _number(self, step: int) -> int | None:
        place = step - self._start
        if place < 0:
            return None
        return self._schedule[place] if place < len(self._schedule) else len(self.compressors)

    def _is_first(self, step: int) -> bool:
        """Return whether a step is the first of a turn."""
        return (step - self._start) % STEPS == 0

    def _add_step(self, step: int, seconds: float) -> None:
        number = self._number(step)
        if number is None:
            return
        turns = self._steps.setdefault(number, [])
        if self._is_first(step):
            turns.append([])
        elif turns:
            turns[-1].append(seconds)

    def _step_seconds(self, number: int) -> float:
        medians = [median(turn) for turn in self._steps.get(number, []) if turn]
        return (max(medians) if number else min(medians)) if medians else nan


def _end_of(step: StepRecord, first: int, last: int) -> float | None:
    """Return when the bucket with these operations had been exchanged; None if that was not recorded.

    Later phases are left out, because they wait for the other buckets.
    """
    handles = step.handles[first:last]
    if step.is_sent_by_torch:
        return max((handle.ended or 0.0 for handle in handles), default=None)
    return max(
        (stop for one in handles for phase, _, stop in one.report.spans if phase in ("encode", "exchange")),
        default=None,
    )


def _record(measured: Measured) -> dict[str, Any]:
    return {
        "candidates": list(measured.specs),
        "step_seconds": list(measured.step_seconds),
        "buckets": [[list(one.names), one.ready, list(one.held)] for one in measured.buckets],
    }


def _of_record(record: Mapping[str, Any]) -> Measured:
    buckets = (BucketTimes(tuple(names), ready, tuple(held)) for names, ready, held in record["buckets"])
    return Measured(tuple(record["candidates"]), tuple(record["step_seconds"]), tuple(buckets))
