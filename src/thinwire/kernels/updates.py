"""What an optimizer makes of a gradient before it is sent: a recipe, which a kernel can follow while it compresses.

Where there is no such kernel, `apply` writes the update over the gradient, and it is compressed after that.
"""

from dataclasses import dataclass

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

    def apply(self, tensor: Tensor) -> None:
        wide = tensor.to(self.m.dtype)  # the same tensor, unless it is of 16 bits
        adam(tensor.device).send(
            wide, self.m, self.v, self.beta1, self.factor, self.scale, self.floor, self.limit, self.rate
        )
        if wide is not tensor:
            tensor.copy_(wide)


@dataclass(frozen=True)
class MomentumUpdate:
    """rate * (gain g + share m): SGD's."""

    m: Tensor
    gain: float
    share: float
    rate: float

    def apply(self, tensor: Tensor) -> None:
        wide = tensor.to(self.m.dtype)
        if self.gain != 1.0:
            wide.mul_(self.gain)
        if self.share:
            wide.add_(self.m, alpha=self.share)
        if self.rate != 1.0:
            wide.mul_(self.rate)
        if wide is not tensor:
            tensor.copy_(wide)


Update = AdamUpdate | MomentumUpdate
