"""Memory that shows whether a kernel wrote outside of its tensor."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ZONE = 4096
"""Elements on each side: as far as a position that is wrong by a whole chunk reaches."""


@contextmanager
def guarded(numel: int, dtype: torch.dtype, *, offset: int = 0) -> Iterator[Tensor]:
    """Yield a contiguous tensor of `numel` elements. Raise AssertionError if anything beside it was written.

    offset   elements by which its address moves, for kernels that depend on alignment.

    >>> with guarded(10, torch.float32) as out:
    ...     _ = out.as_strided((11,), (1,), out.storage_offset()).zero_()  # one element too many
    Traceback (most recent call last):
    ...
    AssertionError: written after the tensor
    """
    fill = 0xA5 if dtype == torch.uint8 else 77
    whole = torch.full((numel + 2 * ZONE + offset,), fill, dtype=dtype)
    start, stop = ZONE + offset, ZONE + offset + numel
    yield whole[start:stop]
    if not bool((whole[:start] == fill).all()):
        raise AssertionError("written before the tensor")
    if not bool((whole[stop:] == fill).all()):
        raise AssertionError("written after the tensor")
