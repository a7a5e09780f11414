"""No compression: the baseline, and the compressor of excluded tensors."""

from dataclasses import dataclass

import torch

from ..kernels.layout import DenseLayout
from .base import Compressor
from .spec import register_compressor


@register_compressor("none")
@dataclass(frozen=True)
class NoCompression(Compressor):
    """Sends every element in the tensor's own dtype.

    >>> import torch, thinwire
    >>> thinwire.NoCompression().nbytes(1000, torch.float16)
    2000
    """

    def _layout(self, numel: int, dtype: torch.dtype) -> DenseLayout:
        return DenseLayout(numel, dtype)
