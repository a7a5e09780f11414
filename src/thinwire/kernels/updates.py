"""What an optimizer makes of a gradient before it is sent: a recipe, which a kernel can follow while it compresses.

Where there is no such kernel, `apply` writes the update over the gradient, and it is compressed after that. When the
step counts, `commit` brings the moments up to date, from the update that is still in the gradient's place.
"""

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
    """Of `commit`; 1 leaves v as it is."""

    def apply(self, tensor: Tensor) -> None:
        wide = tensor.to(self.m.dtype)  # the same tensor, unless it is of 16 bits
        adam(tensor.device).send(
            wide, self.m, self.v, self.beta1, self.factor, self.scale, self.floor, self.limit, self.rate
        )
        if wide is not tensor:
            tensor.copy_(wide)

    def commit(self, tensor: Tensor) -> None:
        adam(tensor.device).commit(
            tensor.to(self.m.dtype), self.m, self.v, self.beta1, self.beta2, self.scale, self.floor, self.rate
        )


@dataclass(frozen=True)
class MomentumUpdate:
    """rate * (gain g + share m): SGD's. To commit, m <- keep m + update / divisor."""

    m: Tensor
    gain: float
    share: float
    rate: float
    keep: float = 0.0
    divisor: float | None = None
    """None: there is no momentum to keep."""

    def apply(self, tensor: Tensor) -> None:
        if (self.gain, self.share, self.rate) == (1.0, 0.0, 1.0):
            return
        wide = tensor.to(self.m.dtype)
        if self.gain != 1.0:
            wide.mul_(self.gain)
        if self.share:
            wide.add_(self.m, alpha=self.share)
        if self.rate != 1.0:
            wide.mul_(self.rate)
        if wide is not tensor:
            tensor.copy_(wide)

    def commit(self, tensor: Tensor) -> None:
        if self.divisor is None:
            return
        if self.keep:
            self.m.mul_(self.keep).add_(tensor, alpha=1 / self.divisor)
        elif tensor.dtype == self.m.dtype:
            torch.div(tensor, self.divisor, out=self.m)
        else:  # which would divide in 16 bits
            self.m.copy_(tensor).div_(self.divisor)


Update = AdamUpdate | MomentumUpdate
