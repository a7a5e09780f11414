"""The assignment of `compressor="auto"`: each compressor sends some of the first steps, and is timed.

    step     0 1 | 2 3 4 5 | 6 7 8 9 | ...                        two steps in which DDP builds its buckets
    sent by      |  none   |quantize |  none   |quantize |        then turns; for optimizers two of topk at the end

The first step of a turn is not timed, because it makes plans and may compile kernels. The time of a step is that from
its first bucket to the first bucket of the next step. So it includes everything: waiting, encoding during the backward
pass, and the optimizer. The median of a turn counts. Of two turns, the quicker one counts for dense, and the slower one
for the other compressors. So a moment in which the machine or the network is slow may cost a gain, but seldom makes
training slower than dense.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from math import nan
from statistics import median
from typing import Any

import torch

from ..compressors import Compressor, format_spec
from ..compressors import compressor as parsed
from .assignment import Assignment
from .auto import BucketTimes, Choice, Measured, confirm, decide
from .parts import StepRecord
from .policy import Policy
from .ranks import Ranks

_log = logging.getLogger("thinwire")

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


class Auto(Assignment):
    """Assigns the compressors that are tried, measures their steps, and finally assigns those of the choice.

    compressors   the compressors to try, the densest first.
    """

    def __init__(self, policy: Policy, families: Mapping[str, int] | None, compressors: Sequence[Compressor]) -> None:
        super().__init__(policy, families)
        self.compressors, self._schedule = tuple(compressors), schedule(compressors)
        self._flushed = False
        """True once no parameter that stays dense has a residual."""
        self._begin_at(max(BEFORE, policy.warmup_steps), {})

    def begin(self, sync: Ranks, step: int, device: torch.device) -> bool:
        """Choose the compressors of this step, and return whether it sends all residuals dense."""
        sizes = self.sizes
        self.choose_if_due(sync, device)
        if device.type == "cuda" and self.choice is None and step > self._start:
            # A time measurement begins or ends here, and a step that skips the wait would seem quick.
            torch.cuda.current_stream(device).synchronize()
        self.begins(step)
        chosen: Mapping[str, Compressor] = self.assigned(step, sizes)
        with_residual = [name for name in sizes if name in sync.unsent]
        flushes = False
        if self.choice is not None and not self._flushed:
            flushes = any(self.sends_dense(name, sizes[name], step) for name in with_residual)
            self._flushed = not flushes
        if flushes:
            # Parameters with a residual get a compressor that uses it, though `flushes` sends them dense. The others
            # stay dense, such as those whose residual an optimizer has applied.
            chosen = {**chosen, **dict.fromkeys(with_residual, self.compressors[1])}
            sync.unsent.fold()
        self._choose(chosen)
        return flushes

    def choose_if_due(self, sync: Ranks, device: torch.device) -> None:
        """Make the choice if the trials are over, from measurements averaged over ranks; rank 0 logs it.

        With one rank, dense is chosen without trials.
        """
        if self.choice is not None:
            return
        if sync.world_size == 1:
            reason = "nothing is compressed, because there is one rank"
            self.choice = Choice(tuple(map(format_spec, self.compressors)), (), reason, ())
        elif sync.steps >= self.end:
            numbers = torch.tensor(self.numbers(sync.layout), dtype=torch.float64)
            # A NaN, for a missing measurement, would void the exchange: 0 is sent, and the share of finite values.
            known = torch.stack([numbers.nan_to_num(), numbers.isfinite().double()]).to(device)
            total, share = sync.average_over_all(known).cpu()
            self.decide(torch.where(share > 0.999, total, torch.nan).tolist(), sync.layout)
        if self.choice is not None and sync.rank == 0:
            _log.info("%s", self.choice.describe())

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

    @property
    def end(self) -> int:
        """Return the first step after the trials."""
        return self._start + len(self._schedule) + (STEPS if self._mixture is not None else 0)

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
        number = self._number(step)
        return number is not None and number < len(self.compressors) and not self.compressors[number].sparse

    def begins(self, step: int) -> None:
        """Stop the time of the previous step, and start that of a step whose first bucket is ready."""
        now = time.perf_counter()
        if self._open is not None and step == self._open[0] + 1:  # otherwise that step was skipped
            self._add_step(self._open[0], now - self._open[1])
        self._open = (step, now) if self.choice is None else None

    def ended(self, step: StepRecord) -> None:
        """Record the times of each bucket, after all buckets of a step were exchanged."""
        number = self._number(step.number)
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

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the choice and all measurements, so that a run resumed in the middle of its trials can finish them."""
        measured = self._measured
        auto: dict[str, Any] = {
            "start": self._start,
            "previous": {name: format_spec(one) for name, one in self._previous.items()},
            "choice": None if self.choice is None else self.choice.record(),
            "mixture": None if self._mixture is None else self._mixture.record(),
            "measured": None if measured is None else measured.record(),
            "steps": {number: [list(turn) for turn in turns] for number, turns in self._steps.items()},
            "held": [[list(names), dict(held)] for names, held in self._held.items()],
            "ready": [[list(names), list(ready)] for names, ready in self._ready.items()],
        }
        return {"auto": auto}

    def load_state_dict(self, state: Mapping[str, Any], *, same_world: bool) -> None:
        """Load the state of a checkpoint.

        With another world size, links and payloads have changed, so all is measured again. The next step keeps its
        compressors, which leaves one step for preparation, and the trials begin after it.
        """
        self._flushed, self._plans, auto = False, {}, state["auto"]
        self._begin_at(int(auto["start"]), {name: parsed(spec) for name, spec in auto["previous"].items()})
        self.choice = None if auto["choice"] is None else Choice.of_record(auto["choice"])
        self._mixture = None if auto["mixture"] is None else Choice.of_record(auto["mixture"])
        self._measured = None if auto["measured"] is None else Measured.of_record(auto["measured"])
        self._steps = {int(number): [list(turn) for turn in turns] for number, turns in auto["steps"].items()}
        self._held = {tuple(names): {int(n): list(s) for n, s in held.items()} for names, held in auto["held"]}
        self._ready = {tuple(names): list(ready) for names, ready in auto["ready"]}
        if not same_world:
            step = int(state["steps"])
            assigned = self.assigned(step, list(state["entries"]))
            self.choice = None
            self._begin_at(step + 1, assigned)

    def _chosen_at(self, step: int) -> Mapping[str, Compressor]:
        return self.assigned(step, self.sizes)

    # The place of a step in the trials.

    def _number(self, step: int) -> int | None:
        """Return the number of the compressor that a step tries; None if it is no step of the trials."""
        place = step - self._start
        if place < 0 or self.choice is not None:
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
