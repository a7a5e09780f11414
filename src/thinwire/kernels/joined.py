"""Flat tensors that are treated as one, without a copy: the gradients of several buckets that are sent together."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate

from torch import Tensor


class Joined:
    """Flat tensors of one dtype and device, one after the other; only the gradient of an `AdamUpdate` may be one.

    >>> import torch
    >>> joined = Joined([torch.arange(4.0), torch.arange(4.0, 10.0)])
    >>> joined.numel(), joined[4:6], [len(piece) for _, piece in joined[2:7].pieces()]
    (10, tensor([4., 5.]), [2, 3])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._ends = tuple(accumulate(tensor.numel() for tensor in tensors))
        self.dtype, self.device = tensors[0].dtype, tensors[0].device

    def numel(self) -> int:
        return self._ends[-1]

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each tensor, and its place among all elements."""
        for end, tensor in zip(self._ends, self._tensors, strict=True):
            yield slice(end - tensor.numel(), end), tensor

    def __getitem__(self, elements: slice) -> "Flat":
        """Return a view of some elements: a tensor if they lie in one of the tensors."""
        start, stop, _ = elements.indices(self.numel())
        found = [
            tensor[max(start - place.start, 0) : stop - place.start]
            for place, tensor in self.pieces()
            if start < place.stop and place.start < stop
        ]
        if not found:
            return self._tensors[0][:0]
        return found[0] if len(found) == 1 else Joined(found)

    def split(self, sizes: Sequence[int]) -> "list[Flat]":
        """Return views of consecutive elements, like `Tensor.split`."""
        ends = list(accumulate(sizes))
        return [self[end - size : end] for size, end in zip(sizes, ends, strict=True)]


Flat = Tensor | Joined


def tensors_of(flat: Flat) -> list[Tensor]:
    """Return the tensors of a flat gradient."""
    return [piece for _, piece in flat.pieces()] if isinstance(flat, Joined) else [flat]


def addresses_of(flat: Flat) -> Hashable:
    """Return where the memory of a flat gradient is."""
    return tuple(piece.data_ptr() for piece in tensors_of(flat))
