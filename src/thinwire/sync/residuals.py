"""Vectors by parameter name, such as residuals and moments, in which neighbouring parameters form one slice.

DDP rebuilds its buckets after the first iteration, checkpoints contain parameters and not buckets, and another run may
have other buckets. So a parameter's vector is found by its name, and moves when it is requested with other neighbours.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..kernels.layout import residual_dtype

_generations = itertools.count()


class NamedVectors:
    """A float32 vector (float64 for float64 parameters) for every parameter; zero until its first use.

    >>> vectors = NamedVectors()
    >>> vectors.slice(["weight", "bias"], [4, 2], torch.float32, torch.device("cpu")).fill_(1.0).shape
    torch.Size([6])
    >>> vectors.slice(["bias"], [2], torch.float32, torch.device("cpu"))
    tensor([1., 1.])
    """

    def __init__(self, parts: Mapping[str, Tensor] | None = None) -> None:
        """Begin with these flat vectors, which are not copied; by default with none."""
        self._parts = dict(parts or {})
        self._slices: dict[tuple[tuple[str | None, int], ...], Tensor] = {}
        self._lock = threading.Lock()
        self.generation = next(_generations)
        """A number that changes whenever a vector moves, and that differs between objects."""

    def slice(
        self, names: Sequence[str | None], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return one flat tensor for these parameters, in this order, with the residual dtype for `dtype`.

        A name of None stands for a gap, whose elements belong to no parameter.
        """
        with self._lock:  # backward may run in a thread of its own
            return self._slice(names, sizes=sizes, dtype=dtype, device=device)

    def _slice(
        self, names: Sequence[str | None], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        key, wide = tuple(zip(names, sizes, strict=True)), residual_dtype(dtype)
        kept = self._slices.get(key)
        if kept is not None and kept.dtype == wide and kept.device == device:
            return kept
        for name, size in zip(names, sizes, strict=True):
            if name in self._parts and self._parts[name].numel() != size:
                raise ValueError(
                    f"parameter {name!r} has {size} elements, its residual has {self._parts[name].numel()}: it belongs "
                    "to another model"
                )
        self.generation = next(_generations)
        made = torch.zeros(sum(sizes), dtype=wide, device=device)
        for name, part in zip(names, made.split(list(sizes)), strict=True):
            if name is not None:
                if name in self._parts:
                    part.copy_(self._parts[name])
                self._parts[name] = part
        moved = {name for name in names if name is not None}
        self._slices = {
            other: flat for other, flat in self._slices.items() if moved.isdisjoint(name for name, _ in other)
        }
        self._slices[key] = made
        return made

    def __getitem__(self, name: str) -> Tensor:
        """Return a view of one parameter's vector."""
        return self._parts[name]

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def named(self) -> dict[str, Tensor]:
        """Return the vectors of all parameters, by name, without copying them."""
        return dict(self._parts)

    def load(self, named: Mapping[str, Tensor]) -> None:
        """Replace all vectors by copies of these."""
        self._parts = {name: tensor.detach().clone().view(-1) for name, tensor in named.items()}
        self._slices = {}
        self.generation = next(_generations)

    def scale(self, factor: float, chosen: Callable[[str], bool]) -> None:
        """Multiply the vectors of the chosen parameters, for example when the scale of the loss changes."""
        for name, part in self._parts.items():
            if chosen(name):
                part.mul_(factor)
