"""The tensors that all rows of one size and dtype share: `SETS` gradients and residuals."""

import torch
from torch import Tensor

from thinwire.kernels.layout import Layout, residual_dtype

from .clock import SETS

KEPT = 0.3
"""Standard deviation of the residuals. That of the gradients is 1."""


class Buffers:
    """`SETS` sets of random normal tensors. Calls take turns on them, so that none finds its data in the cache."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        self._generator = torch.Generator(device).manual_seed(0)
        self.gradients = self.new(dtype)
        self.residuals = self.new(residual_dtype(dtype), KEPT)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)

    def new(self, dtype: torch.dtype, size: float = 1.0) -> list[Tensor]:
        """Return one more random tensor for each set. `size` is the standard deviation."""
        made = [torch.empty(self.numel, dtype=dtype, device=self.device) for _ in range(SETS)]
        for tensor in made:
            tensor.normal_(std=size, generator=self._generator)
        return made

    def payloads(self, layout: Layout, count: int = 1) -> list[Tensor]:
        """Return an uninitialized tensor with room for `count` payloads, for each set."""
        return [torch.empty(count, layout.nbytes, dtype=torch.uint8, device=self.device) for _ in range(SETS)]

    def reset(self) -> None:
        """Fill the gradients and the residuals with new random numbers."""
        for gradient, residual in zip(self.gradients, self.residuals, strict=True):
            gradient.normal_(generator=self._generator)
            residual.normal_(std=KEPT, generator=self._generator)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one element of the gradient."""
        return self.dtype.itemsize

    @property
    def residual_bytes(self) -> int:
        """Bytes of one element of the residual."""
        return self.residuals[0].element_size()
