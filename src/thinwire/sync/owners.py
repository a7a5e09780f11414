"""Residuals of the shards that this rank owns: a `ShardState` for every slice that is reduced "sharded"."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from torch import Tensor

from ..collectives import ShardState
from ..compressors import Compressor, format_spec
from ..compressors import compressor as parsed
from .buckets import Slice
from .residuals import NamedVectors

_Key = tuple[tuple[str | None, int], ...]
"""Names and sizes of the parameters in a slice."""


class Owners:
    """The `ShardState` of every slice.

    A slice with other parameters or another compressor starts with an empty state. The old residual is then
    added to the rank's own residual. Both have the same unit, because a rank's residual is added to the sum over ranks
    too.
    """

    def __init__(self) -> None:
        self._states: dict[_Key, tuple[Compressor, ShardState]] = {}

    def state(self, slice_: Slice, residuals: NamedVectors) -> ShardState:
        """Return the state of this slice.

        If the slice or its compressor is new, all states with a parameter of this slice are first folded into the
        residuals.
        """
        kept = self._states.get(slice_.key)
        if kept is not None and kept[0] == slice_.compressor:
            return kept[1]
        mine = {name for name in slice_.names if name is not None}
        self._fold(lambda names: not mine.isdisjoint(names), residuals)
        made = ShardState()
        self._states[slice_.key] = (slice_.compressor, made)
        return made

    def fold(self, residuals: NamedVectors) -> None:
        """Add the residuals of all states to the rank's own residuals, and drop the states."""
        self._fold(lambda names: True, residuals)

    def _fold(self, chosen: Callable[[list[str | None]], bool], residuals: NamedVectors) -> None:
        for key in [key for key in self._states if chosen([name for name, _ in key])]:
            _, state = self._states.pop(key)
            for name, begin, part in _pieces(key, state):
                residuals[name][begin : begin + part.numel()].add_(part)

    def scale(self, factor: float, chosen: Callable[[str], bool]) -> None:
        """Multiply the residuals of slices whose parameters are chosen: all parameters of a slice are, or none."""
        for key, (_, state) in self._states.items():
            if state.residual is not None and all(chosen(name) for name, _ in key if name is not None):
                state.residual.mul_(factor)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all slices with a residual, for a checkpoint."""
        return [
            {"run": [list(part) for part in key], "compressor": format_spec(compressor), **state.state_dict()}
            for key, (compressor, state) in self._states.items()
            if state.residual is not None
        ]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Replace all states by those of a checkpoint."""
        made: dict[_Key, tuple[Compressor, ShardState]] = {}
        for saved in states:
            state = ShardState()
            state.load_state_dict({"residual": saved["residual"], "spans": saved["spans"]})
            made[tuple((name, int(size)) for name, size in saved["run"])] = (parsed(str(saved["compressor"])), state)
        self._states = made


def _pieces(key: _Key, state: ShardState) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (parameter, first element in it, residual from there on) for each part of a state's residual."""
    if state.residual is None:
        return
    ends = list(accumulate(size for _, size in key))
    lengths = [stop - start for start, stop in state.spans]
    for (start, stop), part in zip(state.spans, state.residual.split(lengths), strict=True):
        for (name, size), end in zip(key, ends, strict=True):
            low, high = max(start, end - size), min(stop, end)
            if low < high and name is not None:
                yield name, low - (end - size), part[low - start : high - start]
