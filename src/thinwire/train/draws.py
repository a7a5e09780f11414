"""Random numbers by place: a sample's are the same in whatever batch, and by whatever rank, it is drawn.

A generator would have to be wound to every place. Instead each number is a hash of (seed, what it is for, place,
column), by the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014), in NumPy, whose unsigned integers wrap around and are shifted without a sign.
"""

from functools import cache
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_QUANTILES = 1 << 16


def numbers(seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """(places, count) whole numbers of 32 random bits, as int64; `what` keeps draws for different ends apart.

    >>> numbers(0, "noise", torch.tensor([7, 8]), 3)[1].equal(numbers(0, "noise", torch.tensor([8]), 3)[0])
    True
    """
    key = int.from_bytes(blake2b(f"{what}/{seed}".encode(), digest_size=8).digest(), "big")
    rows = _mixed(np.uint64(key) ^ places.numpy().astype(np.uint64) * _GOLDEN)
    columns = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    return torch.from_numpy((_mixed(rows[:, None] + columns) >> np.uint64(32)).astype(np.int64))


def below(limit: int, seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """(places, count) whole numbers from 0 to limit - 1; the limit is below 2^31."""
    return numbers(seed, what, places, count) * limit >> 32


def normal(seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """(places, count) float32 numbers of a normal distribution, out of 65,536 that are equally likely.

    Looked up and not computed: the last bit of a logarithm may depend on where in a tensor its argument stands.
    """
    return _quantiles()[numbers(seed, what, places, count) >> 16]


@cache
def _quantiles() -> Tensor:
    middles = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    quantiles: Tensor = torch.special.ndtri(middles)
    return quantiles.float()


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
