"""The assignment of `compressor="auto"`: each compressor sends some of the first steps, and is timed.

    step     0 1 | 2 3 4 5 | 6 7 8 9 | ...                        two steps in which DDP builds its buckets
    sent by      |  none   |quantize |  none   |quantize |        then turns; for optimizers two of topk at the end

The first step of a turn is not timed, because it makes plans and may compile kernels. The time of a step is that from
its first bucket to the first bucket of the next step, which includes everything. The median of a turn counts. Of two
turns, the quicker one counts for dense, and the slower one for the other compressors, so that a slow moment may cost a
gain, but seldom makes training slower than dense.

Small tensors are sent dense until the choice is made, so that they have no residual if dense is chosen.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from math import nan
from statistics import median
from typing import Any

import torch

from ..compressors import Compressor, format_spec
from .auto import Choice, decide
from .peers import Peers
from .policy import DENSE, Assignment, Policy
from .shards import ShardGroup

_log = logging.getLogger("thinwire")

BEFORE = 2  # steps until DDP has rebuilt its buckets
TURNS, STEPS = 2, 4  # of each compressor, and in a turn


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
    """Tries compressors, the densest first, measures their steps, and finally assigns the chosen one."""

    def __init__(
        self,
        policy: Policy,
        families: Mapping[str, int] | None,
        compressors: Sequence[Compressor],
        shards: ShardGroup | None = None,
    ) -> None:
        super().__init__(policy, families)
        self._shards = shards
        self.compressors, self._schedule = tuple(compressors), schedule(compressors)
        self._start = max(BEFORE, policy.warmup_steps)
        self._turns: dict[int, list[list[float]]] = {}  # seconds of steps, by the number of the compressor
        self._open: tuple[int, float] | None = None  # the step under way, and its start

    def begin(self, peers: Peers, step: int, device: torch.device) -> None:
        self.choose_if_due(peers, step, device)
        if device.type == "cuda" and self.choice is None and step > self._start:
            # A time measurement begins or ends here, and a step that skips the wait would seem quick.
            torch.cuda.current_stream(device).synchronize()
        self.begins(step)
        self._choose(self._chosen_at(step))

    def choose_if_due(self, peers: Peers, step: int, device: torch.device) -> None:
        """Make the choice if the trials are over, from averaged measurements; with one rank, choose dense at once."""
        specs = list(map(format_spec, self.compressors))
        if self.choice is not None or (peers.world_size > 1 and step < self.end):
            return
        if peers.world_size == 1:
            self.choice = Choice(specs, [], specs[0], "nothing is compressed, because there is one rank")
        else:
            seconds = torch.tensor(self.seconds(), dtype=torch.float64)
            # A NaN, for a missing measurement, would void the exchange: 0 is sent, and the share of finite values.
            known = torch.stack([seconds.nan_to_num(), seconds.isfinite().double()]).to(device)
            known = peers.mean_of(known)
            mean, share = (known if self._shards is None else self._shards.add(known) / self._shards.size).cpu()
            self.choice = decide(specs, torch.where(share > 0.999, mean, torch.nan).tolist())
        self._plans = {}  # small tensors are not dense any more
        if peers.rank == 0:
            _log.info("%s", self.choice.describe())

    @property
    def end(self) -> int:
        return self._start + len(self._schedule)

    def tries_gradients(self, step: int) -> bool:
        """Return whether the step tries a compressor that is not sparse: going from gradients to updates is easy."""
        number = self._number(step)
        return number is not None and not self.compressors[number].sparse

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

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the choice and all measurements, so that a run resumed in the middle of its trials can finish them."""
        turns = {number: [list(turn) for turn in turns] for number, turns in self._turns.items()}
        choice = None if self.choice is None else self.choice.record()
        return {"auto": {"start": self._start, "choice": choice, "turns": turns}}

    def load_state_dict(self, state: Mapping[str, Any], *, same_world: bool) -> None:
        """Load the state of a checkpoint.

        With another world size, all is measured again, unless updates were sent, since momentum differs between ranks.
        """
        super().load_state_dict(state, same_world=same_world)
        auto, step = state["auto"], int(state["steps"])
        self._start, self._open = int(auto["start"]), None
        self.choice = None if auto["choice"] is None else Choice.of_record(auto["choice"])
        self._turns = {int(number): [list(turn) for turn in turns] for number, turns in auto["turns"].items()}
        if same_world:
            return
        self._turns, last = {}, self._chosen_at(step - 1)
        sent_gradients = last is None or last == DENSE or (self.choice is None and not last.sparse)
        if self._families is None or sent_gradients:
            self.choice, self._start = None, max(self._start, step + BEFORE)

    def _chosen_at(self, step: int) -> Compressor | None:
        choice = self.choice
        number = self._number(step) if choice is None else choice.candidates.index(choice.compressor)
        return None if number is None else self.compressors[number]

    def _compressor_of(self, name: str, numel: int, step: int, chosen: Compressor | None) -> Compressor:
        if self.choice is None and self.policy.is_small(name, numel):
            return DENSE
        return super()._compressor_of(name, numel, step, chosen)

    def _number(self, step: int) -> int | None:
        place = step - self._start
        return self._schedule[place] if self.choice is None and 0 <= place < len(self._schedule) else None
