"""Updates of the optimizers: formulas that turn a gradient into an update before it is sent.

The gradient is only read, and the update is written to a separate tensor. A step that is not applied, because some rank
has a NaN, therefore changes nothing. `advance` updates the moments, and is called only if the step is applied.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from . import adam
from .joined import Flat, Joined


class Update(Protocol):
    """What every update does. Where a gradient is not finite, or so large that nothing can be made of it, nor is it."""

    def write(self, gradient: Flat, out: Tensor) -> None:
        """Write the update to `out`; the gradient and the moments are only read."""

    def advance(self, gradient: Flat, residual: Tensor | None) -> None:
        """Advance the moments, and add the update to the residual with the same bits that `write` wrote."""


@dataclass(frozen=True)
class AdamUpdate:
    """Adam's update: rate * cut((beta1 m + (1 - beta1) factor g) / (scale sqrt(v) + floor)), see `reference.adam`."""

    m: Tensor
    v: Tensor
    beta1: float
    factor: float
    scale: float
    floor: float
    limit: float
    rate: float
    beta2: float = 1.0  # Decay of v in `advance`; 1 leaves v unchanged
    on_device: Tensor | None = None
    """The same numbers in GPU memory, where a recording (`recording.py`) reads those of the current step.

    The kernels of `cuda` use them instead of the other numbers, if they are there.
    """

    @torch.no_grad()
    def write(self, gradient: Flat, out: Tensor) -> None:
        """Write the update to `out`, which has the dtype of the moments. The gradient may have any float dtype.

        The gradient and the moments are only read.
        """
        for update, piece, part in self._of_each(gradient, out):
            adam(out.device, self.m.dtype).write(update, piece, part)

    @torch.no_grad()
    def advance(self, gradient: Flat, residual: Tensor | None) -> None:
        """Advance the moments, and add the update to the residual with the same bits that `write` wrote."""
        for update, piece, part in self._of_each(gradient, residual):
            adam(self.m.device, self.m.dtype).advance(update, piece, part)

    def _of_each(self, gradient: Flat, other: Tensor | None) -> Iterator[tuple["AdamUpdate", Tensor, Any]]:
        """Yield the tensors of a gradient, with this update and the part of `other` for each."""
        if not isinstance(gradient, Joined):
            yield self, gradient, other
            return
        for at, piece in gradient.pieces():
            yield replace(self, m=self.m[at], v=self.v[at]), piece, None if other is None else other[at]


@dataclass(frozen=True)
class MomentumUpdate:
    """SGD's update: rate b, or rate (d + momentum b) with Nesterov; d = factor g + decay p, b = momentum m + d."""

    m: Tensor | None  # The momentum buffer. None if no momentum is kept; `momentum` is 0 then
    momentum: float
    factor: float = 1.0
    nesterov: bool = False
    rate: float = 1.0
    decay: float = 0.0
    parameters: tuple[tuple[int, int, Tensor], ...] = ()
    """(start, stop, flat tensor) of each parameter: its range in the gradient and its values, for weight decay."""

    @torch.no_grad()
    def write(self, gradient: Flat, out: Tensor) -> None:
        """Write the update to `out`. Gradient (of any float dtype), momentum and parameters are only read."""
        flat = out.view(-1)
        for elements, _, update in self._blocks(gradient, out.dtype):
            flat[elements] = update

    @torch.no_grad()
    def advance(self, gradient: Flat, residual: Tensor | None) -> None:
        """Compute m <- b, and add the update to the residual with the same bits that `write` wrote."""
        known = residual if self.m is None else self.m
        if known is None:  # then nothing is kept
            return
        for elements, momentum, update in self._blocks(gradient, known.dtype):
            if residual is not None:
                residual.view(-1)[elements] += update
            if self.m is not None:
                self.m.view(-1)[elements] = momentum

    def _blocks(self, gradient: Flat, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (slice of elements, b, update), one block at a time.

        `write` and `advance` must get the same bits, so both use the same blocks: whether torch rounds a product before
        adding it may depend on the place in a tensor.
        """
        assert isinstance(gradient, Tensor)  # only that of an AdamUpdate may be joined
        flat = gradient.view(-1)
        size = _CPU_BLOCK if flat.device.type == "cpu" else _BLOCK
        for start in range(0, flat.numel(), size):
            stop = min(start + size, flat.numel())
            d = flat[start:stop].to(dtype, copy=True)
            if self.factor != 1.0:
                d.mul_(self.factor)
            if self.decay:
                for first, end, parameter in self.parameters:
                    low, high = max(first, start), min(end, stop)
                    if low < high:
                        d[low - start : high - start].add_(parameter[low - first : high - first], alpha=self.decay)
            b = d if self.m is None else torch.add(d, self.m.view(-1)[start:stop], alpha=self.momentum)
            update = torch.add(d, b, alpha=self.momentum) if self.nesterov else b
            yield slice(start, stop), b, update if self.rate == 1.0 else update * self.rate


_BLOCK = 1 << 24
_CPU_BLOCK = 1 << 18  # Elements in a block, so that temporary tensors stay small. On a CPU they fit into its cache
