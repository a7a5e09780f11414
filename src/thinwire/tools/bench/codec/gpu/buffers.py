"""The tensors that all rows of one size and dtype share: `SETS` gradients and residuals."""

import torch
from torch import Tensor

from thinwire.kernels.layout import Layout, residual_dtype

from .clock import SETS

KEPT = 0.3
"""How large residuals are beside gradients of size 1."""


class Buffers:
    """Random normal numbers, in memory of `SETS` times the size: calls in turn find nothing in the cache."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        self._generator = torch.Generator(device).manual_seed(0)
        self.gradients = self.new(dtype)
        self.residuals = self.new(residual_dtype(dtype), KEPT)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)

    def new(self, dtype: torch.dtype, size: float = 1.0) -> list[Tensor]:
        """A further tensor in each set."""
        made = [torch.empty(self.numel, dtype=dtype, device=self.device) for _ in range(SETS)]
        for tensor in made:
            tensor.normal_(std=size, generator=self._generator)
        return made

    def payloads(self, layout: Layout, count: int = 1) -> list[Tensor]:
        """Room for `count` payloads in each set."""
        return [torch.empty(count, layout.nbytes, dtype=torch.uint8, device=self.device) for _ in range(SETS)]

    def reset(self) -> None:
        """Residuals as they might be after a step, gradients as they might be before one."""
        for gradient, residual in zip(self.gradients, self.residuals, strict=True):
            gradient.normal_(generator=self._generator)
            residual.normal_(std=KEPT, generator=self._generator)

    @property
    def gradient_bytes(self) -> int:
        """Of one entry."""
        return self.dtype.itemsize

    @property
    def residual_bytes(self) -> int:
        """Of one entry."""
        return self.residuals[0].element_size()
