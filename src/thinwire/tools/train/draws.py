"""Random numbers by position: a sample has the same numbers in any batch, on any rank and on any device.

A generator would have to be advanced to every position. Instead, each number is a hash of (seed, purpose, position,
column), by the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014), which `kernels.reference.numbers` has in torch.
"""

from functools import cache
from hashlib import blake2b

import torch
from torch import Tensor

from thinwire.kernels.reference.numbers import GOLDEN, mix, shift_right

_QUANTILES = 1 << 16


def numbers(seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """Return whole numbers of 32 random bits, as int64 of shape (len(places), count).

    places   positions of the samples. The numbers are drawn on their device, and are the same on all devices.
    what     the purpose; different purposes have different numbers.

    >>> numbers(0, "noise", torch.tensor([7, 8]), 3)[1].equal(numbers(0, "noise", torch.tensor([8]), 3)[0])
    True
    """
    key = int.from_bytes(blake2b(f"{what}/{seed}".encode(), digest_size=8).digest(), "big", signed=True)
    rows = mix(places * GOLDEN ^ key)
    columns = torch.arange(1, count + 1, device=places.device) * GOLDEN
    return shift_right(mix(rows[:, None] + columns), 32)


def below(limit: int, seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """Return whole numbers from 0 to limit - 1, of shape (len(places), count); the limit is below 2^31."""
    return numbers(seed, what=what, places=places, count=count) * limit >> 32


def normal(seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """Return float32 numbers of a normal distribution, of shape (len(places), count).

    They are looked up in a table of 65,536 equally likely values. They are not computed, because the last bit of a
    logarithm may depend on the position of its argument in a tensor.
    """
    return _quantiles(places.device)[numbers(seed, what=what, places=places, count=count) >> 16]


@cache
def _quantiles(device: torch.device) -> Tensor:
    middles = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    quantiles: Tensor = torch.special.ndtri(middles)
    return quantiles.float().to(device)
