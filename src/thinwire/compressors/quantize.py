"""Quantisation to a few bits per element (Seide et al. 2014: 1 bit)."""

from dataclasses import KW_ONLY, InitVar, dataclass, replace

import torch

from ..kernels.layout import QuantizeLayout
from .base import Compressor
from .spec import ROUNDING_WENT, check_choice, register_compressor

BITS = (1, 2, 4, 8)
BITS_OF_A_SUM = {1: 4, 2: 4, 4: 8, 8: 8}
BLOCKS = tuple(1 << exponent for exponent in range(5, 17))


@register_compressor("quantize")
@dataclass(frozen=True)
class Quantize(Compressor):
    """Sends every element in `bits` bits, with one scale for each block of `block` elements.

    bits   1, 2, 4 or 8.
    block  a power of two from 32 to 65,536.

    >>> import torch, thinwire
    >>> thinwire.Quantize(bits=8).compress(torch.tensor([127.0, -3.2, 0.4, 2.5] * 64)).decompress()[:4]
    tensor([127.,  -3.,   0.,   2.])
    """

    bits: int = 8
    _: KW_ONLY
    block: int = 256
    rounding: InitVar[object] = None

    def __post_init__(self, rounding: object) -> None:
        if rounding is not None:
            raise ValueError(f"rounding {rounding!r}: {ROUNDING_WENT}")
        check_choice("bits", self.bits, BITS)
        check_choice("block", self.block, BLOCKS)

    def for_sum(self, ranks: int) -> "Quantize":
        """Return the compressor with more bits (at most 8), because a sum over ranks has more levels."""
        return replace(self, bits=BITS_OF_A_SUM[self.bits])

    def _layout(self, numel: int, dtype: torch.dtype) -> QuantizeLayout:
        return QuantizeLayout(numel, dtype, bits=self.bits, block=self.block)
