"""Random numbers, and the sample, at each position of an endless stream: the same in any batch and on any device.

Each number is a hash of (seed, purpose, position, column), by the output function of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014), which `kernels.reference.numbers` has in torch.
The stream is one epoch after another, each in an order that depends only on (seed, epoch): so a position in it is all
that a run has to save.
"""

from functools import cache, lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from thinwire.kernels.reference.numbers import GOLDEN, mix, shift_right

_CPU = torch.device("cpu")
_QUANTILES = 1 << 16


def numbers(seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """Return whole numbers of 32 random bits, as int64 of shape (len(places), count).

    what     the purpose; different purposes have different numbers.
    places   positions of the samples, on the device on which the numbers are drawn.

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

    They are looked up in a table of 65,536 equally likely values: if computed, the last bit of a logarithm may depend
    on the position of its argument in a tensor.
    """
    return _quantiles(places.device)[numbers(seed, what=what, places=places, count=count) >> 16]


@cache
def _quantiles(device: torch.device) -> Tensor:
    quantiles: Tensor = torch.special.ndtri((torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES)
    return quantiles.float().to(device)


def order(seed: int, length: int, start: int, size: int, device: torch.device = _CPU) -> Tensor:
    """Return the indices, from 0 to length - 1, of the `size` samples from position `start` on, as int64.

    They are the same on every device: the order of an epoch is drawn on the CPU, and copied to the device once.

    >>> first, second = order(0, 5, start=0, size=10).split(5)
    >>> sorted(first.tolist()), sorted(second.tolist()), first.equal(second)
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], False)
    """
    parts, end = [], start + size
    while start < end:
        epoch, at = divmod(start, length)
        parts.append(_permutation(seed, length=length, epoch=epoch, device=device)[at : at + end - start])
        start += len(parts[-1])
    return torch.cat(parts)  # a copy, so that callers cannot change the cached order


@lru_cache(maxsize=2)  # a batch may span two epochs, and ranks that are threads may be in two epochs
def _permutation(seed: int, length: int, epoch: int, device: torch.device) -> Tensor:
    own = int(numbers(seed, what="order", places=torch.tensor([epoch]), count=1))
    return torch.randperm(length, generator=torch.Generator().manual_seed(own)).to(device)
