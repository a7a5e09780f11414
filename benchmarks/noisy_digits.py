"""Digits with noise on every pixel, so that no model is ever certain, and the losses of trainings differ visibly."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from thinwire.tools.train.data import Batch, numbers
from thinwire.tools.train.images import Images

NOISE, DRAWS = 0.5, 10
"""Standard deviation of the noise, where pixels are from 0 to 1; how often each validation image comes."""


class NoisyDigits(Images):
    """The digits, with noise that is drawn anew in every epoch."""

    def batch(self, start: int, size: int, seed: int) -> Batch:
        """Return `size` images from position `start` of the stream."""
        images, labels = super().batch(start, size, seed)
        return Batch(_noisy(images, seed, what="noise", start=start), labels)

    def validation(self, size: int) -> Iterator[Batch]:
        """Yield the validation images, at most `size` at a time."""
        images, labels = next(super().validation(len(self._test_labels)))
        for draw in range(DRAWS):
            noisy = _noisy(images, seed=0, what="validation", start=draw * len(labels))
            yield from map(Batch, noisy.split(size), labels.split(size))


def _noisy(images: Tensor, seed: int, what: str, start: int) -> Tensor:
    places = torch.arange(start, start + len(images), device=images.device)
    drawn = numbers(seed, what=what, places=places, count=images[0].numel())
    return images + NOISE * _quantiles(images.device)[drawn >> 16].view(images.shape)


@cache  # computed one by one, the last bit of a logarithm may depend on the position of its argument in a tensor
def _quantiles(device: torch.device) -> Tensor:
    quantiles: Tensor = torch.special.ndtri((torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16))
    return quantiles.float().to(device)
