"""Tripwires: a tensor in the middle of a larger one, whose surroundings must stay as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ZONE = 4096
"""Entries on each side: as far as a position that is wrong by a whole chunk reaches."""


@contextmanager
def guarded(numel: int, dtype: torch.dtype, *, offset: int = 0) -> Iterator[Tensor]:
    """A contiguous view of `numel` elements; fails if anything beside it was written. `offset` moves its address."""
    fill = 0xA5 if dtype == torch.uint8 else 77
    whole = torch.full((numel + 2 * ZONE + offset,), fill, dtype=dtype)
    start, stop = ZONE + offset, ZONE + offset + numel
    yield whole[start:stop]
    assert bool((whole[:start] == fill).all()), "written before the tensor"
    assert bool((whole[stop:] == fill).all()), "written behind the tensor"
