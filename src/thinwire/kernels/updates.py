"""What an optimizer makes of a gradient before it is sent: its update, by formula.

The gradient is only read, and the update goes into a tensor of its own: a step that does not count, because of a NaN on
some rank, leaves everything as it was. Only when the step counts does `advance` bring the moments up to date.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import adam


@dataclass(frozen=True)
class AdamUpdate:
    """rate * cut((beta1 m + (1 - beta1) factor g) / (scale sqrt(v) + floor)), see `reference.adam`."""

    m: Tensor
    v: Tensor
    beta1: float
    factor: float
    scale: float
    floor: float
    limit: float
    rate: float
    beta2: float = 1.0
    """Of `advance`; 1 leaves v as it is."""
    on_device: Tensor | None = None
    """The same numbers in the memory of the GPU, where a recording (`recording.py`) finds those of its step."""

    @torch.no_grad()
    def write(self, gradient: Tensor, out: Tensor) -> None:
        """out <- the update. Only reads the gradient, of any float dtype, and the moments, whose dtype `out` has."""
        adam(out.device).write(
            gradient, self.m, self.v, self.beta1, self.factor, self.scale, self.floor, self.limit, self.rate, out,
            **self._more(),
        )  # fmt: skip

    @torch.no_grad()
    def advance(self, gradient: Tensor, residual: Tensor | None) -> None:
        """Bring the moments up to date with this gradient; residual += what `write` made of it, bit for bit."""
        adam(self.m.device).advance(
            gradient, self.m, self.v, residual, self.beta1, self.beta2, self.factor, self.scale, self.floor,
            self.limit, self.rate, **self._more(),
        )  # fmt: skip

    def _more(self) -> dict[str, Tensor]:
        return {} if self.on_device is None else {"numbers": self.on_device}


@dataclass(frozen=True)
class MomentumUpdate:
    """SGD's. d = factor g + decay p; b = momentum m + d; update = rate b, or with Nesterov rate (d + momentum b)."""

    m: Tensor | None
    """None: no momentum is kept, and `momentum` is 0."""
    momentum: float
    factor: float = 1.0
    nesterov: bool = False
    rate: float = 1.0
    decay: float = 0.0
    parameters: tuple[tuple[int, int, Tensor], ...] = ()
    """(start, stop, flat tensor): which entries of the gradient belong to which parameter, for weight decay."""

    @torch.no_grad()
    def write(self, gradient: Tensor, out: Tensor) -> None:
        """out <- the update. Only reads the gradient, of any float dtype, the momentum and the parameters."""
        flat = out.view(-1)
        for entries, _, update in self._blocks(gradient, out.dtype):
            flat[entries] = update

    @torch.no_grad()
    def advance(self, gradient: Tensor, residual: Tensor | None) -> None:
        """m <- b; residual += what `write` made of this gradient, bit for bit."""
        known = residual if self.m is None else self.m
        if known is None:  # then nothing is kept
            return
        for entries, momentum, update in self._blocks(gradient, known.dtype):
            if residual is not None:
                residual.view(-1)[entries] += update
            if self.m is not None:
                self.m.view(-1)[entries] = momentum

    def _blocks(self, gradient: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(entries, b, update), a block at a time.

        Of the same blocks whoever asks: where torch rounds a product before it adds it may depend on the place in a
        tensor, and both callers must get the same bits.
        """
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
_CPU_BLOCK = 1 << 18
"""Entries at a time: temporary tensors stay this small, on a CPU in its cache."""

Update = AdamUpdate | MomentumUpdate
