"""MNIST, Fashion-MNIST and CIFAR-10, from a folder.

Images stay uint8 on their device, and each batch becomes float32 there when it is requested, with the same bits on all
devices. CIFAR-10's training images are shifted by up to 4 pixels each way, with black around them, and mirrored with
probability 1/2. Both are drawn by the sample's position in the stream: so an image looks different in every epoch, but
the same in any batch.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from . import cifar, fashion, idx
from .data import Batch
from .draws import below, order

_SHIFT = 4


class _Images:
    """A data set of images (count, channels, rows, columns) and labels (count), kept as uint8."""

    classes: ClassVar = 10

    def __init__(
        self,
        parts: dict[str, tuple[Tensor, Tensor]],
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device | str,
    ) -> None:
        self._images, self._labels = (part.to(device) for part in parts["train"])
        self._test_images, self._test_labels = (part.to(device) for part in parts["test"])
        self._mean, self._std = (255 * torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (mean, std))
        self.length = len(self._labels)

    def batch(self, start: int, size: int, seed: int) -> Batch:
        """Return `size` images from position `start` of the stream."""
        device = self._labels.device
        chosen = order(seed, length=self.length, start=start, size=size, device=device)
        images = self._varied(self._images[chosen], seed, torch.arange(start, start + size, device=device))
        return self._made(images, self._labels[chosen])

    def validation(self, size: int) -> Iterator[Batch]:
        """Yield all test images, at most `size` at a time."""
        yield from map(self._made, self._test_images.split(size), self._test_labels.split(size))

    def _varied(self, images: Tensor, seed: int, places: Tensor) -> Tensor:
        """Return training images after augmentation; here they are unchanged."""
        return images

    def _made(self, images: Tensor, labels: Tensor) -> Batch:
        return Batch(images.float().sub_(self._mean).div_(self._std), labels.long())


class MNIST(_Images):
    """28 x 28 grey images of handwritten digits, 60,000 for training and 10,000 for validation."""

    inputs: ClassVar = (1, idx.PIXELS, idx.PIXELS)

    def __init__(self, folder: Path, *, device: torch.device | str = "cpu") -> None:
        missing = idx.missing_files(folder)
        if missing:
            raise ValueError(
                f"{folder} has no {missing[0]}[.gz]; expected MNIST's files there, each with or without .gz: "
                f"{', '.join(idx.FILES)}; put them there, or add --download"
            )
        super().__init__(idx.read_parts(folder, "MNIST"), mean=(0.1307,), std=(0.3081,), device=device)


class FashionMNIST(_Images):
    """28 x 28 grey images of clothes, 60,000 for training and 10,000 for validation."""

    inputs: ClassVar = (1, idx.PIXELS, idx.PIXELS)

    def __init__(self, folder: Path, *, device: torch.device | str = "cpu") -> None:
        parts = idx.read_parts(fashion.find_folder(folder), "Fashion-MNIST")
        super().__init__(parts, mean=(0.2860,), std=(0.3530,), device=device)


class CIFAR10(_Images):
    """32 x 32 colour images of animals and vehicles, 50,000 for training and 10,000 for validation."""

    inputs: ClassVar = cifar.SHAPE

    def __init__(self, folder: Path, *, device: torch.device | str = "cpu") -> None:
        mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
        super().__init__(cifar.read_cifar(folder), mean=mean, std=std, device=device)

    def _varied(self, images: Tensor, seed: int, places: Tensor) -> Tensor:
        count, channels, side, _ = images.shape
        across, down = below(2 * _SHIFT + 1, seed=seed, what="shift", places=places, count=2).unbind(1)
        mirrored = below(2, seed=seed, what="mirror", places=places, count=1).bool()
        along = torch.arange(side, device=images.device)
        rows = down[:, None] + along
        columns = across[:, None] + torch.where(mirrored, along.flip(0), along)
        wide = side + 2 * _SHIFT
        padded = F.pad(images, (_SHIFT,) * 4).view(count, channels, wide * wide)
        pixels = (rows[:, :, None] * wide + columns[:, None, :]).view(count, 1, side * side)
        return padded.gather(2, pixels.expand(-1, channels, -1)).view(images.shape)
