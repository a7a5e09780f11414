"""The sample at each position of an endless stream: one epoch after another, each in an order of its own.

The order depends only on (seed, epoch). So a run only has to save its position in the stream to continue with the same
samples, in the middle of an epoch and with any world size.
"""

from functools import lru_cache

import torch
from torch import Tensor

from .draws import numbers

_CPU = torch.device("cpu")


def order(seed: int, length: int, start: int, size: int, device: torch.device = _CPU) -> Tensor:
    """Return the indices, from 0 to length - 1, of the `size` samples from position `start` on, as int64.

    They are the same on every device: the order of an epoch is drawn on the CPU, and copied to the device once.

    >>> first, second = order(0, 5, start=0, size=10).split(5)
    >>> sorted(first.tolist()), sorted(second.tolist()), first.equal(second)
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], False)
    """
    if start < 0 or size < 1:
        raise ValueError(f"{size} samples from place {start}, expected 1 or more, from 0 on")
    parts, end = [], start + size
    while start < end:
        epoch, at = divmod(start, length)
        part = _permutation(seed, length=length, epoch=epoch, device=device)[at : at + end - start]
        parts.append(part)
        start += len(part)
    return torch.cat(parts)  # a copy, so that callers cannot change the cached order


@lru_cache(maxsize=2)  # a batch may span two epochs, and ranks that are threads may be in two epochs
def _permutation(seed: int, length: int, epoch: int, device: torch.device) -> Tensor:
    own = int(numbers(seed, what="order", places=torch.tensor([epoch]), count=1))
    return torch.randperm(length, generator=torch.Generator().manual_seed(own)).to(device)
