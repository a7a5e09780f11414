"""`compressor="auto"`: each compressor sends some of the first steps and is timed, and then one is chosen.

    step     0 1 | 2 3 4 5 | 6 7 8 9 | ...                        two steps in which DDP builds its buckets
    sent by      |  none   |quantize |  none   |quantize |        then turns; for optimizers two of topk at the end

The first step of a turn is not timed, because it makes plans and may compile kernels. The time of a step is that from
its first bucket to the first bucket of the next step, which includes everything. The median of a turn counts. Of two
turns, the quicker one counts for dense, and the slower one for the other compressors, so that a slow moment may cost a
gain, but seldom makes training slower than dense.

Dense is chosen unless the step of another compressor is clearly faster, because dense loses nothing. Small tensors are
sent dense until the choice is made, so that they have no residual if dense is chosen.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isfinite, nan
from statistics import median
from typing import Any, NamedTuple

import torch

from ..compressors import Compressor, NoCompression, Quantize, format_spec
from ..compressors.by_ranks import default_compressor
from .shards import ShardGroup
from .slots import Peers

_log = logging.getLogger("thinwire")

GRADIENTS: tuple[Compressor, ...] = (NoCompression(), Quantize(bits=8))
"""Compressors that are tried for gradients, the densest first; not top-k, which ruins Adam."""
MARGIN = 1.03  # dense is kept unless its step takes longer than this factor times the fastest step
BEFORE = 2  # steps until DDP has rebuilt its buckets
TURNS, STEPS = 2, 4  # of each compressor, and in a turn


def updates(ranks: int) -> tuple[Compressor, ...]:
    """Return the compressors that are tried for the updates of thinwire's optimizers, the densest first."""
    return (*GRADIENTS, default_compressor(ranks))


class Choice(NamedTuple):
    """The compressor chosen of the specs that were tried, the seconds of their steps if measured, and the reason."""

    candidates: list[str]
    step_seconds: list[float]
    compressor: str
    reason: str

    def record(self) -> dict[str, Any]:
        return self._asdict()

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> "Choice":
        """Return the choice that `record` was made from; raise ValueError if it is none of those tried."""
        made = Choice(**{name: record[name] for name in Choice._fields})
        made.candidates.index(made.compressor)
        return made

    def describe(self) -> str:
        return f"auto: {self.reason}"


def decide(specs: Sequence[str], step_seconds: Sequence[float]) -> Choice:
    """Return the choice of one of these compressors, by the seconds of their steps.

    >>> [decide(("none", "quantize:bits=8"), (dense, 1.0)).compressor for dense in (2.5, 1.02)]
    ['quantize:bits=8', 'none']
    """
    times = ", ".join(f"{_short(spec)} {1e3 * s:,.1f} ms" for spec, s in zip(specs, step_seconds, strict=True))
    best = min(range(len(specs)), key=step_seconds.__getitem__)  # the densest one if several are equal
    if not all(isfinite(one) and one > 0 for one in step_seconds):
        best, reason = 0, f"nothing is compressed, because not every compressor could be measured ({times})"
    elif step_seconds[0] <= MARGIN * step_seconds[best]:
        best, reason = 0, f"nothing is compressed, because no step is clearly faster than dense ({times})"
    else:
        reason = f"{_short(specs[best])} has the fastest step ({times})"
    return Choice(list(specs), list(step_seconds), specs[best], reason)


def _short(spec: str) -> str:
    """Return a spec with only its bits and ratio.

    >>> _short("quantize:bits=8,block=256"), _short("topk:ratio=1/64,bits=2,chunk=4096")
    ('quantize:bits=8', 'topk:ratio=1/64,bits=2')
    """
    name, _, options = spec.partition(":")
    kept = [option for option in options.split(",") if option.partition("=")[0] in ("bits", "ratio")]
    return f"{name}:{','.join(kept)}" if kept else name


def schedule(compressors: Sequence[Compressor]) -> list[int]:
    """Return the number of the compressor of each step of the trials.

    Sparse compressors come last, because going back from updates to gradients has a cost.

    >>> "".join(map(str, schedule(updates(2))))
    '000011110000111122222222'
    """
    dense = [number for number, one in enumerate(compressors) if not one.sparse]
    sparse = [number for number, one in enumerate(compressors) if one.sparse]
    return [number for order in (dense, sparse) for _ in range(TURNS) for number in order for _ in range(STEPS)]


class Trials:
    """Tries compressors, the densest first, measures their steps, and finally chooses one.

    of_updates   the compressors send an optimizer's updates.
    """

    def __init__(self, peers: Peers, *, warmup_steps: int, of_updates: bool, shards: ShardGroup | None = None) -> None:
        self._peers, self._of_updates, self._shards = peers, of_updates, shards
        self.choice: Choice | None = None
        self._start = max(BEFORE, warmup_steps)
        self._turns: dict[int, list[list[float]]] = {}  # seconds of steps, by the number of the compressor
        self._open: tuple[int, float] | None = None  # the step under way, and its start

    @cached_property
    def compressors(self) -> tuple[Compressor, ...]:
        return updates(self._peers.nodes) if self._of_updates else GRADIENTS

    @cached_property
    def _schedule(self) -> list[int]:
        return schedule(self.compressors)

    def chosen_at(self, step: int) -> Compressor | None:
        """Return the compressor that is chosen, or else tried at this step, if any."""
        choice = self.choice
        number = self._number(step) if choice is None else choice.candidates.index(choice.compressor)
        return None if number is None else self.compressors[number]

    def _number(self, step: int) -> int | None:
        place = step - self._start
        return self._schedule[place] if self.choice is None and 0 <= place < len(self._schedule) else None

    @property
    def end(self) -> int:
        return self._start + len(self._schedule)

    def begin(self, step: int, device: torch.device) -> None:
        self.choose_if_due(step, device)
        if device.type == "cuda" and self.choice is None and step > self._start:
            # A time measurement begins or ends here, and a step that skips the wait would seem quick.
            torch.cuda.current_stream(device).synchronize()
        self.begins(step)

    def choose_if_due(self, step: int, device: torch.device) -> None:
        """Make the choice if the trials are over, from averaged measurements; with one rank, choose dense at once."""
        specs = list(map(format_spec, self.compressors))
        if self.choice is not None or (self._peers.world_size > 1 and step < self.end):
            return
        if self._peers.world_size == 1:
            self.choice = Choice(specs, [], specs[0], "nothing is compressed, because there is one rank")
        else:
            seconds = torch.tensor(self.seconds(), dtype=torch.float64)
            # A NaN, for a missing measurement, would void the exchange: 0 is sent, and the share of finite values.
            known = torch.stack([seconds.nan_to_num(), seconds.isfinite().double()]).to(device)
            known = self._peers.mean_of(known)
            mean, share = (known if self._shards is None else self._shards.add(known) / self._shards.size).cpu()
            self.choice = decide(specs, torch.where(share > 0.999, mean, torch.nan).tolist())
        if self._peers.rank == 0:
            _log.info("%s", self.choice.describe())

    def begins(self, step: int) -> None:
        """Stop the time of the previous step, and start that of a step whose first bucket is ready."""
        now = time.perf_counter()
        number = None if self._open is None else self._number(self._open[0])
        if self._open is not None and number is not None and step == self._open[0] + 1:  # else that step was skipped
            turns = self._turns.setdefault(number, [])
            if (self._open[0] - self._start) % STEPS == 0:
                turns.append([])
            elif turns:
                turns[-1].append(now - self._open[1])
        self._open = (step, now) if self.choice is None else None

    def seconds(self) -> list[float]:
        """Return the seconds of a step on this rank, for each compressor; NaN where nothing was measured."""
        found = []
        for number in range(len(self.compressors)):
            medians = [median(turn) for turn in self._turns.get(number, []) if turn]
            found.append((max(medians) if number else min(medians)) if medians else nan)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the choice and all measurements, so that a run resumed in the middle of its trials can finish them."""
        turns = {number: [list(turn) for turn in turns] for number, turns in self._turns.items()}
        choice = None if self.choice is None else self.choice.record()
        return {"auto": {"start": self._start, "choice": choice, "turns": turns}}

    def load_state_dict(self, state: Mapping[str, Any], *, same_world: bool) -> None:
        """Load the state of a checkpoint.

        With another world size, all is measured again, unless updates were sent, since momentum differs between ranks.
        """
        auto, step = state["auto"], int(state["steps"])
        self._start, self._open = int(auto["start"]), None
        self.choice = None if auto["choice"] is None else Choice.of_record(auto["choice"])
        self._turns = {int(number): [list(turn) for turn in turns] for number, turns in auto["turns"].items()}
        if same_world:
            return
        self._turns, last = {}, self.chosen_at(step - 1)
        no_updates = last is None or isinstance(last, NoCompression) or (self.choice is None and not last.sparse)
        if not self._of_updates or no_updates:
            self.choice, self._start = None, max(self._start, step + BEFORE)
