"""What this rank owes as the owner of shares of sums: a `ShardState` for every run that is reduced "sharded"."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from torch import Tensor

from ..collectives import ShardState
from ..compressors import Compressor, format_spec
from ..compressors import compressor as parsed
from .buckets import Run
from .residuals import NamedVectors

_Key = tuple[tuple[str | None, int], ...]
"""Names and sizes of a run."""


class Owners:
    """By run. A run that comes in other company, or under another compressor, starts with an empty one.

    What was owed then becomes the rank's own to send: it is in units of the sum, as everything a rank adds to it.
    """

    def __init__(self) -> None:
        self._states: dict[_Key, tuple[Compressor, ShardState]] = {}

    def state(self, run: Run, residuals: NamedVectors) -> ShardState:
        """The state for this run, after all others that have a parameter of it were folded into the residuals."""
        kept = self._states.get(run.key)
        if kept is not None and kept[0] == run.compressor:
            return kept[1]
        mine = {name for name in run.names if name is not None}
        self._fold(lambda names: not mine.isdisjoint(names), residuals)
        made = ShardState()
        self._states[run.key] = (run.compressor, made)
        return made

    def fold(self, residuals: NamedVectors) -> None:
        """Everything, as for another number of ranks."""
        self._fold(lambda names: True, residuals)

    def _fold(self, chosen: Callable[[list[str | None]], bool], residuals: NamedVectors) -> None:
        for key in [key for key in self._states if chosen([name for name, _ in key])]:
            _, state = self._states.pop(key)
            for name, begin, owed in _pieces(key, state):
                residuals[name][begin : begin + owed.numel()].add_(owed)

    def scale(self, factor: float, chosen: Callable[[str], bool]) -> None:
        """Multiply the residuals of runs whose names are chosen: those of a run all are, or none."""
        for key, (_, state) in self._states.items():
            if state.residual is not None and all(chosen(name) for name, _ in key if name is not None):
                state.residual.mul_(factor)

    def state_dict(self) -> list[dict[str, Any]]:
        return [
            {"run": [list(entry) for entry in key], "compressor": format_spec(compressor), **state.state_dict()}
            for key, (compressor, state) in self._states.items()
            if state.residual is not None
        ]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        made: dict[_Key, tuple[Compressor, ShardState]] = {}
        for saved in states:
            state = ShardState()
            state.load_state_dict({"residual": saved["residual"], "spans": saved["spans"]})
            made[tuple((name, int(size)) for name, size in saved["run"])] = (parsed(str(saved["compressor"])), state)
        self._states = made


def _pieces(key: _Key, state: ShardState) -> Iterator[tuple[str, int, Tensor]]:
    """(parameter, first entry in it, what is owed from there on)"""
    if state.residual is None:
        return
    ends = list(accumulate(size for _, size in key))
    lengths = [stop - start for start, stop in state.spans]
    for (start, stop), owed in zip(state.spans, state.residual.split(lengths), strict=True):
        for (name, size), end in zip(key, ends, strict=True):
            low, high = max(start, end - size), min(stop, end)
            if low < high and name is not None:
                yield name, low - (end - size), owed[low - start : high - start]
