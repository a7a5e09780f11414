"""Data sets of images, and all data sets by name.

Images stay uint8 on their device, and each batch becomes float32 there when it is requested, with the same bits on all
devices. What is drawn for a training image is drawn by the sample's position in the stream: so an image looks different
in every epoch, but the same in any batch.
"""

import gzip
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .data import Batch, Data, Text, below, normal, order
from .image_files import CLASSES, Parts, read_cifar, read_mnist
from .models import ModelConfig, model_config

_SHIFT = 4
_TEST_SHARE = 5
"""One digit in so many is for validation."""
_NOISY_DRAWS = 10
FITTING = {
    "text": "gpt", "digits": "cnn:size=8", "mnist": "cnn:size=28", "fashion-mnist": "cnn:size=28",
    "cifar10": "resnet18",
}  # fmt: skip
"""A model for each data set."""


class _Images:
    """A data set of images, with the mean and the standard deviation of each channel as parts of its largest value."""

    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    largest: ClassVar = 255

    def __init__(self, parts: Parts, device: torch.device | str) -> None:
        self._images, self._labels = (part.to(device) for part in parts["train"])
        self._test_images, self._test_labels = (part.to(device) for part in parts["test"])
        self._mean, self._std = (
            self.largest * torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (self.mean, self.std)
        )
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
        return images

    def _made(self, images: Tensor, labels: Tensor) -> Batch:
        return Batch(images.float().sub_(self._mean).div_(self._std), labels.long())


class Digits(_Images):
    """8 x 8 images of handwritten digits, 1,797 of them (see digits/LICENSE).

    noise   standard deviation of the noise that is added to every pixel, from 0 to 1, anew in every epoch. With 0.5 no
            model is ever certain, so that the losses of different trainings differ visibly.
    """

    mean, std, largest = (0.0,), (1.0,), 16

    def __init__(self, noise: float = 0.0, *, device: torch.device | str = "cpu") -> None:
        self._noise = noise
        path = resources.files(__package__).joinpath("digits/digits.csv.gz")
        with path.open("rb") as packed, gzip.open(packed, "rt") as file:
            table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))  # 64 pixels, and the digit
        images, labels = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1]
        test = torch.arange(len(labels)) % _TEST_SHARE == 0
        super().__init__({"train": (images[~test], labels[~test]), "test": (images[test], labels[test])}, device)

    def batch(self, start: int, size: int, seed: int) -> Batch:
        """Return `size` images from position `start` of the stream, with the noise added."""
        images, labels = super().batch(start, size, seed)
        return Batch(self._noisy(images, seed, what="noise", start=start), labels)

    def validation(self, size: int) -> Iterator[Batch]:
        """Yield the validation images. With noise, each image comes `_NOISY_DRAWS` times with different noise."""
        images, labels = self._made(self._test_images, self._test_labels)
        for draw in range(_NOISY_DRAWS if self._noise else 1):
            noisy = self._noisy(images, seed=0, what="validation", start=draw * len(labels))
            yield from map(Batch, noisy.split(size), labels.split(size))

    def _noisy(self, images: Tensor, seed: int, what: str, start: int) -> Tensor:
        if not self._noise:
            return images
        places = torch.arange(start, start + len(images), device=images.device)
        return images + self._noise * normal(seed, what=what, places=places, count=images[0].numel()).view(images.shape)


class _FromFiles(_Images):
    read: ClassVar[Callable[[Path], Parts]]

    def __init__(self, folder: Path, *, device: torch.device | str = "cpu") -> None:
        super().__init__(type(self).read(folder), device)


class MNIST(_FromFiles):
    """28 x 28 grey images of handwritten digits, 60,000 for training and 10,000 for validation."""

    mean, std, read = (0.1307,), (0.3081,), partial(read_mnist, name="MNIST")


class FashionMNIST(_FromFiles):
    """28 x 28 grey images of clothes, 60,000 for training and 10,000 for validation."""

    mean, std, read = (0.2860,), (0.3530,), partial(read_mnist, name="Fashion-MNIST")


class CIFAR10(_FromFiles):
    """32 x 32 colour images of animals and vehicles, 50,000 for training and 10,000 for validation.

    Training images are shifted by up to 4 pixels each way, with black around them, and mirrored with probability 1/2.
    """

    mean, std, read = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), partial(read_cifar)

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


def load_data(name: str, folder: Path, context: int | None = None, *, device: torch.device | str = "cpu") -> Data:
    """Load a data set, one of `FITTING`. That the model fits has been checked.

    folder    the folder of the images; for text, a file that is read in place of Python's sources
    context   number of bytes in a sample of text, as many as the model sees at once
    device    device of the data and of the batches; the samples do not depend on it

    >>> load_data("digits", Path("data")).length
    1437
    """
    if name == "text":
        assert context is not None
        return Text(context, file=folder if folder.is_file() else None, device=device)
    if name == "digits":
        return Digits(device=device)
    return {"mnist": MNIST, "fashion-mnist": FashionMNIST, "cifar10": CIFAR10}[name](folder, device=device)


def check_fit(config: ModelConfig, name: str) -> None:
    """Raise ValueError if the model cannot be trained on this data. The data need not be loaded or downloaded.

    >>> check_fit(model_config("cnn:size=8"), "mnist")
    Traceback (most recent call last):
        ...
    ValueError: model cnn takes 1 x 8 x 8, and mnist has 1 x 28 x 28: use model cnn:size=28, or other data
    """
    if name not in FITTING:
        raise ValueError(f"data {name!r} is unknown, expected one of {', '.join(FITTING)}")
    shapes = config.inputs, model_config(FITTING[name]).inputs
    if shapes[0] != shapes[1]:
        takes, has = (" x ".join(map(str, shape)) or "bytes" for shape in shapes)
        raise ValueError(
            f"model {config.name} takes {takes}, and {name} has {has}: use model {FITTING[name]}, or other data"
        )
    classes = getattr(config, "classes", CLASSES)
    if classes < CLASSES:
        raise ValueError(f"model {config.name} with classes={classes}, but {name} has {CLASSES} classes")
