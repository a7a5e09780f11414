"""Quantisation: every entry, in a few bits (Seide et al. 2014 for one bit, Alistarh et al. 2017 for stochastic)."""

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
    """Every entry in `bits` bits, with one scale for each `block` entries.

    bits      1, 2, 4 or 8.
    block     a power of two from 32 to 65,536.
    rounding  "nearest", the best with a residual; "stochastic", unbiased, for use without one (1 and 2 bits: only so).
    seed      of the stochastic draws, together with the `key` given to `compress`; give each rank another.

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
        return self.rounding == "stochastic"

    @property
    def contracts(self) -> bool:
        return self.bits > 2 or not self.draws

    def for_sum(self, ranks: int) -> "Quantize":
        """A sum of signs has many levels."""
        return replace(self, bits=BITS_OF_A_SUM[self.bits])

    def draw_key(self, key: int | None) -> int:
        return mix_key(self.seed, key) if self.draws and key is not None else 0

    def _layout(self, numel: int, dtype: torch.dtype) -> QuantizeLayout:
        return QuantizeLayout(numel, dtype, self.bits, self.block, self.draws)
