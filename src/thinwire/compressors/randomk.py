"""Random-k: sends a new random subset of the elements in each step (Stich et al. 2018)."""

from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from math import ceil

import torch

from ..kernels.layout import RandomKLayout
from .base import Compressor
from .spec import Ratio, check_seed, mix_key, parse_ratio, register_compressor


@register_compressor("randomk")
@dataclass(frozen=True)
class RandomK(Compressor):
    """Sends a random share `ratio` of the elements, drawn anew for each `key`.

    Values are sent in the tensor's dtype, and positions are not sent. Ranks with the same seed and key draw the same
    positions, so a plain all-reduce can sum their values. torch's global random generator is not used.

    Without a residual, the values are scaled up so that their expectation is the tensor. With a residual they are not.

    >>> import torch, thinwire
    >>> c = thinwire.RandomK(ratio="50%", seed=7)
    >>> c.compress(torch.ones(8), torch.zeros(8), key=1).decompress().sum()
    tensor(4.)
    """

    ratio: Ratio
    _: KW_ONLY
    seed: int = 0
    sparse = True
    draws = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", parse_ratio(self.ratio))
        check_seed(self.seed)

    def draw_key(self, key: int | None) -> int:
        """Return the mix of seed and key that the positions are drawn from."""
        return mix_key(self.seed, key or 0)

    def _layout(self, numel: int, dtype: torch.dtype) -> RandomKLayout:
        fewest = ceil(numel / (1 << 31))  # the draw within a stratum has 31 bits
        return RandomKLayout(numel, dtype, max(fewest, ceil(numel * Fraction(self.ratio))))
