"""Quantisation to a few bits per element (Seide et al. 2014: 1 bit; Alistarh et al. 2017: stochastic rounding)."""

from dataclasses import KW_ONLY, dataclass, replace

import torch

from ..kernels.layout import QuantizeLayout
from .base import Compressor
from .spec import check_choice, check_seed, mix_key, register_compressor

BITS = (1, 2, 4, 8)
BITS_OF_A_SUM = {1: 4, 2: 4, 4: 8, 8: 8}
BLOCKS = tuple(1 << exponent for exponent in range(5, 17))
ROUNDINGS = ("nearest", "stochastic")


@register_compressor("quantize")
@dataclass(frozen=True)
class Quantize(Compressor):
    """Sends every element in `bits` bits, with one scale for each block of `block` elements.

    bits      1, 2, 4 or 8.
    block     a power of two from 32 to 65,536.
    rounding  "nearest" is best with a residual. "stochastic" is unbiased and meant for use without a residual; with 1
              or 2 bits it cannot have one.
    seed      seed of the stochastic draws, which also depend on the `key` of `compress`. Give each rank a different
              seed.

    >>> import torch, thinwire
    >>> thinwire.Quantize(bits=8).compress(torch.tensor([127.0, -3.2, 0.4, 2.5] * 64)).decompress()[:4]
    tensor([127.,  -3.,   0.,   2.])
    """

    bits: int = 8
    _: KW_ONLY
    block: int = 256
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, BITS)
        check_choice("block", self.block, BLOCKS)
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_seed(self.seed)
        if self.seed and not self.draws:
            raise ValueError(f"seed {self.seed} with rounding {self.rounding}, which draws nothing; expected seed 0")

    @property
    def draws(self) -> bool:
        """Return whether the rounding is stochastic."""
        return self.rounding == "stochastic"

    @property
    def contracts(self) -> bool:
        """Return False for stochastic rounding to 1 or 2 bits, whose error is larger than the input."""
        return self.bits > 2 or not self.draws

    def for_sum(self, ranks: int) -> "Quantize":
        """Return the compressor with more bits (at most 8), because a sum over ranks has more levels."""
        return replace(self, bits=BITS_OF_A_SUM[self.bits])

    def draw_key(self, key: int | None) -> int:
        """Return the mix of seed and key that the stochastic rounding depends on; 0 for nearest rounding."""
        return mix_key(self.seed, key) if self.draws and key is not None else 0

    def _layout(self, numel: int, dtype: torch.dtype) -> QuantizeLayout:
        return QuantizeLayout(numel, dtype, bits=self.bits, block=self.block, stochastic=self.draws)
