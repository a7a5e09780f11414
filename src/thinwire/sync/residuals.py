"""Vectors by parameter name, in which neighbouring parameters form one slice: moments, and residuals.

A run may have other buckets, and DDP rebuilds them. So a parameter's vector is found by its name, and moves when it is
requested with other neighbours.
"""

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import ShardState
from ..compressors import Compressor, format_spec
from ..compressors import compressor as parsed
from ..kernels.layout import residual_dtype
from .buckets import Slice

_generations = itertools.count()
_Key = tuple[tuple[str | None, int], ...]  # names and sizes


class NamedVectors:
    """A float32 vector (float64 for float64 parameters) for every parameter; zero until its first use.

    >>> vectors = NamedVectors()
    >>> vectors.slice(["weight", "bias"], [4, 2], torch.float32, torch.device("cpu")).fill_(1.0).shape
    torch.Size([6])
    >>> vectors.slice(["bias"], [2], torch.float32, torch.device("cpu"))
    tensor([1., 1.])
    """

    def __init__(self, parts: Mapping[str, Tensor] | None = None) -> None:
        self._parts = dict(parts or {})
        self._slices: dict[_Key, Tensor] = {}
        self._lock = threading.Lock()
        self.generation = next(_generations)  # changes whenever a vector moves, and differs between objects

    def slice(
        self, names: Sequence[str | None], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return one flat tensor in residual dtype for these parameters; None stands for a gap between them."""
        key, wide = tuple(zip(names, sizes, strict=True)), residual_dtype(dtype)
        with self._lock:  # backward may run in a thread of its own
            kept = self._slices.get(key)
            if kept is None or kept.dtype != wide or kept.device != device:
                kept = self._slices[key] = self._make(key, wide, device)
            return kept

    def _make(self, key: _Key, dtype: torch.dtype, device: torch.device) -> Tensor:
        for name, size in key:
            if name in self._parts and self._parts[name].numel() != size:
                raise ValueError(
                    f"parameter {name!r} has {size} elements, its residual has {self._parts[name].numel()}: it belongs "
                    "to another model"
                )
        self.generation = next(_generations)
        sizes = [size for _, size in key]
        made = torch.zeros(sum(sizes), dtype=dtype, device=device)
        for (name, _), part in zip(key, made.split(sizes), strict=True):
            if name is not None:
                if name in self._parts:
                    part.copy_(self._parts[name])
                self._parts[name] = part
        moved = {name for name, _ in key if name is not None}
        self._slices = {
            other: flat for other, flat in self._slices.items() if moved.isdisjoint(name for name, _ in other)
        }
        return made

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name]

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def named(self) -> dict[str, Tensor]:
        return dict(self._parts)

    def load(self, named: Mapping[str, Tensor]) -> None:
        self._parts = {name: tensor.detach().clone().view(-1) for name, tensor in named.items()}
        self._slices = {}
        self.generation = next(_generations)

    def scale(self, factor: float, chosen: Callable[[str], bool]) -> None:
        for name, part in self._parts.items():
            if chosen(name):
                part.mul_(factor)


class Residuals(NamedVectors):
    """What a rank has not sent: a vector of each parameter, and a `ShardState` of each slice that is reduced "sharded".

    The state of a slice with other parameters or another compressor is added to the vectors, which have the same unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[_Key, tuple[Compressor, ShardState]] = {}

    def state(self, slice_: Slice) -> ShardState:
        """Return the state of this slice's shards. If it is new, fold all with a parameter of this slice first."""
        kept = self._states.get(slice_.key)
        if kept is not None and kept[0] == slice_.compressor:
            return kept[1]
        mine = {name for name in slice_.names if name is not None}
        self.fold(mine)
        made = ShardState()
        self._states[slice_.key] = (slice_.compressor, made)
        return made

    def fold(self, names: Collection[str] | None = None) -> None:
        """Add the residuals of states to the vectors, and drop the states: those with one of these names, or all."""
        for key in [key for key in self._states if names is None or any(name in names for name, _ in key)]:
            _, state = self._states.pop(key)
            self.generation = next(_generations)
            if state.residual is None:
                continue
            ends = list(itertools.accumulate(size for _, size in key))
            parts = state.residual.split([stop - start for start, stop in state.spans])
            for (start, stop), part in zip(state.spans, parts, strict=True):
                for (name, size), end in zip(key, ends, strict=True):
                    low, high = max(start, end - size), min(stop, end)
                    if low < high and name is not None:
                        at = low - (end - size)  # the first element in the parameter
                        self[name][at : at + high - low].add_(part[low - start : high - start])

    def pop(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return the residuals of these parameters, with those of shards, and remove them here."""
        self.fold()
        parts = self.named()
        self.load({name: part for name, part in parts.items() if name not in names})
        return {name: part for name, part in parts.items() if name in names}

    def scale(self, factor: float, chosen: Callable[[str], bool]) -> None:
        """Multiply the residuals of the chosen parameters: of all that share a slice, or of none."""
        super().scale(factor, chosen)
        for key, (_, state) in self._states.items():
            if state.residual is not None and all(chosen(name) for name, _ in key if name is not None):
                state.residual.mul_(factor)

    def owner_states(self) -> list[dict[str, Any]]:
        return [
            {"run": [list(part) for part in key], "compressor": format_spec(compressor), **state.state_dict()}
            for key, (compressor, state) in self._states.items()
            if state.residual is not None
        ]

    def load(self, named: Mapping[str, Tensor], owner_states: Iterable[Mapping[str, Any]] = ()) -> None:
        made: dict[_Key, tuple[Compressor, ShardState]] = {}
        for saved in owner_states:
            state = ShardState()
            state.load_state_dict({"residual": saved["residual"], "spans": saved["spans"]})
            made[tuple((name, int(size)) for name, size in saved["run"])] = (parsed(str(saved["compressor"])), state)
        super().load(named)
        self._states = made
