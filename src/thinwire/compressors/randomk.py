"""Random-k: a fresh random share of the entries each step (Stich et al. 2018)."""

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
    """A random `ratio` of the entries, drawn anew for each `key`; values in the tensor's dtype, no position sent.

    Every rank that compresses with the same seed and key draws the same positions, so the values of all ranks can be
    summed by a plain all-reduce. torch's global generator is not touched.

    Without a residual the values are scaled up so that the expectation is the tensor; with one they are not.

    >>> import torch, thinwire
    >>> c = thinwire.RandomK(ratio="50%", seed=7)
    >>> c.compress(torch.ones(8), torch.zeros(8), key=1).decompress().sum()
    tensor(4.)
    """

    ratio: Ratio
    _: KW_ONLY
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", parse_ratio(self.ratio))
        check_seed(self.seed)

    @property
    def sparse(self) -> bool:
        return True

    @property
    def draws(self) -> bool:
        return True

    def draw_key(self, key: int | None) -> int:
        return mix_key(self.seed, key or 0)

    def _layout(self, numel: int, dtype: torch.dtype) -> RandomKLayout:
        fewest = ceil(numel / (1 << 31))  # the draw within a stratum has 31 bits
        return RandomKLayout(numel, dtype, max(fewest, ceil(numel * Fraction(self.ratio))))
