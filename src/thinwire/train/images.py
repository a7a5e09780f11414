"""MNIST and CIFAR-10, from a folder. Images stay bytes in memory, and each batch becomes float32 when it is asked for.

CIFAR-10's training images are shifted by up to 4 pixels each way, with black around them, and every second one is
mirrored. Both are drawn by the sample's place in the stream, so that an image looks different in every epoch, and yet
the same in whatever batch it comes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from . import cifar, idx
from .data import Batch
from .draws import below
from .order import order

_SHIFT = 4


class _Images:
    """Images (count, channels, rows, columns) and labels (count), as bytes."""

    def __init__(
        self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        self._images, self._labels = train
        self._test_images, self._test_labels = test
        self._mean, self._std = (255 * torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std))
        self.length = len(self._labels)

    def batch(self, start: int, size: int, seed: int) -> Batch:
        chosen = order(seed, self.length, start, size)
        images = self._varied(self._images[chosen], seed, torch.arange(start, start + size))
        return self._made(images, self._labels[chosen])

    def validation(self, size: int) -> Iterator[Batch]:
        yield from map(self._made, self._test_images.split(size), self._test_labels.split(size))

    def _varied(self, images: Tensor, seed: int, places: Tensor) -> Tensor:
        """For training."""
        return images

    def _made(self, images: Tensor, labels: Tensor) -> Batch:
        return Batch(images.float().sub_(self._mean).div_(self._std), labels.long())


class MNIST(_Images):
    """28 x 28 grey images of handwritten digits, 60,000 and 10,000 for validation; the target is the digit."""

    inputs: ClassVar = (1, idx.PIXELS, idx.PIXELS)
    classes: ClassVar = idx.CLASSES

    def __init__(self, folder: Path) -> None:
        super().__init__(idx.read_part(folder, "train"), idx.read_part(folder, "t10k"), (0.1307,), (0.3081,))


class CIFAR10(_Images):
    """32 x 32 images in colour of animals and vehicles, 50,000 and 10,000 for validation; the target is the kind."""

    inputs: ClassVar = cifar.SHAPE
    classes: ClassVar = cifar.CLASSES

    def __init__(self, folder: Path) -> None:
        parts = cifar.read_cifar(folder)
        super().__init__(parts["train"], parts["test"], (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))

    def _varied(self, images: Tensor, seed: int, places: Tensor) -> Tensor:
        count, channels, side, _ = images.shape
        across, down = below(2 * _SHIFT + 1, seed, "shift", places, 2).unbind(1)
        mirrored = below(2, seed, "mirror", places, 1).bool()
        along = torch.arange(side)
        rows = down[:, None] + along
        columns = across[:, None] + torch.where(mirrored, along.flip(0), along)
        wide = side + 2 * _SHIFT
        padded = F.pad(images, (_SHIFT,) * 4).view(count, channels, wide * wide)
        pixels = (rows[:, :, None] * wide + columns[:, None, :]).view(count, 1, side * side)
        return padded.gather(2, pixels.expand(-1, channels, -1)).view(images.shape)
