"""Random numbers by place: a sample's are the same in whatever batch, by whatever rank and on any device it is drawn.

A generator would have to be wound to every place. Instead each number is a hash of (seed, what it is for, place,
column), by the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014). torch has no arithmetic of uint64 on all devices. Products of its int64 wrap around to the same bits, and a shift
to the right only has to drop the copies of the sign.
"""

from functools import cache
from hashlib import blake2b

import torch
from torch import Tensor


def _signed(bits: int) -> int:
    """Return the int64 that has these 64 bits."""
    return bits - (bits >> 63 << 64)


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTORS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_QUANTILES = 1 << 16


def numbers(seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """(places, count) whole numbers of 32 random bits, as int64; `what` keeps draws for different ends apart.

    They are drawn on the device where the places are, and the same on all devices.

    >>> numbers(0, "noise", torch.tensor([7, 8]), 3)[1].equal(numbers(0, "noise", torch.tensor([8]), 3)[0])
    True
    """
    key = int.from_bytes(blake2b(f"{what}/{seed}".encode(), digest_size=8).digest(), "big", signed=True)
    rows = _mixed(places * _GOLDEN ^ key)
    columns = torch.arange(1, count + 1, device=places.device) * _GOLDEN
    return _shifted(_mixed(rows[:, None] + columns), 32)


def below(limit: int, seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """(places, count) whole numbers from 0 to limit - 1; the limit is below 2^31."""
    return numbers(seed, what, places, count) * limit >> 32


def normal(seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """(places, count) float32 numbers of a normal distribution, out of 65,536 that are equally likely.

    Looked up and not computed: the last bit of a logarithm may depend on where in a tensor its argument stands.
    """
    return _quantiles(places.device)[numbers(seed, what, places, count) >> 16]


@cache
def _quantiles(device: torch.device) -> Tensor:
    middles = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    quantiles: Tensor = torch.special.ndtri(middles)
    return quantiles.float().to(device)


def _mixed(z: Tensor) -> Tensor:
    """Return the hash of z, in the memory of z."""
    z.bitwise_xor_(_shifted(z, 30)).mul_(_FACTORS[0])
    z.bitwise_xor_(_shifted(z, 27)).mul_(_FACTORS[1])
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift to the right as if z had no sign."""
    return (z >> bits).bitwise_and_((1 << 64 - bits) - 1)
