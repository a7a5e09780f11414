"""What this rank owes as the owner of shares of sums: a `ShardState` for every run that is reduced "sharded"."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from torch import Tensor

from .buckets import Run
from .collectives import ShardState
from .compressors import format_spec
from .residuals import NamedVectors


class Owners:
    """By run. A run that comes in other company, or under another compressor, starts with an empty one.

    What was owed then becomes the rank's own to send: it is in units of the sum, as everything a rank adds to it.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[str | None, ...], tuple[tuple[int, ...], str, ShardState]] = {}

    def state(self, run: Run, residuals: NamedVectors) -> ShardState:
        """The state for this run, after all others that have a parameter of it were folded into the residuals."""
        spec = format_spec(run.compressor)
        kept = self._states.get(run.names)
        if kept is not None and kept[1] == spec:
            return kept[2]
        mine = {name for name in run.names if name is not None}
        self._fold(lambda names, _: not mine.isdisjoint(names), residuals)
        made = ShardState()
        self._states[run.names] = (run.sizes, spec, made)
        return made

    def fold(self, residuals: NamedVectors) -> None:
        """Everything, as for another number of ranks."""
        self._fold(lambda names, spec: True, residuals)

    def _fold(self, chosen: Callable[[tuple[str | None, ...], str], bool], residuals: NamedVectors) -> None:
        for names in [names for names, (_, spec, _) in self._states.items() if chosen(names, spec)]:
            sizes, _, state = self._states.pop(names)
            for name, begin, owed in _pieces(names, sizes, state):
                residuals[name][begin : begin + owed.numel()].add_(owed)

    def scale(self, factor: float) -> None:
        for _, _, state in self._states.values():
            if state.residual is not None:
                state.residual.mul_(factor)

    def state_dict(self) -> list[dict[str, Any]]:
        return [
            {"names": list(names), "sizes": list(sizes), "compressor": spec, **state.state_dict()}
            for names, (sizes, spec, state) in self._states.items()
            if state.residual is not None
        ]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        made = {}
        for saved in states:
            state = ShardState()
            state.load_state_dict({"residual": saved["residual"], "spans": saved["spans"]})
            made[tuple(saved["names"])] = (tuple(saved["sizes"]), str(saved["compressor"]), state)
        self._states = made


def _pieces(
    names: tuple[str | None, ...], sizes: tuple[int, ...], state: ShardState
) -> Iterator[tuple[str, int, Tensor]]:
    """(parameter, first entry in it, what is owed from there on)"""
    if state.residual is None:
        return
    ends = list(accumulate(sizes))
    lengths = [stop - start for start, stop in state.spans]
    for (start, stop), owed in zip(state.spans, state.residual.split(lengths), strict=True):
        for name, size, end in zip(names, sizes, ends, strict=True):
            low, high = max(start, end - size), min(stop, end)
            if low < high and name is not None:
                yield name, low - (end - size), owed[low - start : high - start]
