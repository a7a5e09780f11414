"""Data sets of images, and all data sets by name.

Images stay uint8 on their device, and each batch becomes float32 there when it is requested, with the same bits on all
devices. What is drawn for a training image is drawn by the sample's position in the stream: so an image looks different
in every epoch, but the same in any batch.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .data import Batch, Text, below, order
from .image_files import Parts, read
from .models import ModelConfig, model_config

_SHIFT = 4
_TEST_SHARE = 5  # One digit in so many is for validation
FITTING = {
    "text": "gpt", "digits": "cnn:size=8", "mnist": "cnn:size=28", "fashion-mnist": "cnn:size=28",
    "cifar10": "resnet18",
}  # fmt: skip
"""A model for each data set."""
_SCALE = {
    "digits": (16, (0.0,), (1.0,)),
    "mnist": (255, (0.1307,), (0.3081,)),
    "fashion-mnist": (255, (0.2860,), (0.3530,)),
    "cifar10": (255, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
"""The largest value of a pixel, and as parts of it the mean and the standard deviation of each channel."""


class Images:
    """A data set of images: digits, which come with thinwire, or one that is in files in a folder.

    Training images of CIFAR-10 are shifted by up to 4 pixels each way, with black around them, and half are mirrored.
    """

    def __init__(self, name: str, folder: Path = Path(), *, device: torch.device | str = "cpu") -> None:
        parts = read_digits() if name == "digits" else read(name, folder)
        self._images, self._labels = (part.to(device) for part in parts["train"])
        self._test_images, self._test_labels = (part.to(device) for part in parts["test"])
        largest, *scale = _SCALE[name]
        self._mean, self._std = (largest * torch.tensor(values, device=device).view(1, -1, 1, 1) for values in scale)
        self._varies = name == "cifar10"
        self.length = len(self._labels)

    def batch(self, start: int, size: int, seed: int) -> Batch:
        device = self._labels.device
        chosen = order(seed, length=self.length, start=start, size=size, device=device)
        images = self._images[chosen]
        if self._varies:
            images = _varied(images, seed, torch.arange(start, start + size, device=device))
        return self._made(images, self._labels[chosen])

    def validation(self, size: int) -> Iterator[Batch]:
        yield from map(self._made, self._test_images.split(size), self._test_labels.split(size))

    def _made(self, images: Tensor, labels: Tensor) -> Batch:
        return Batch(images.float().sub_(self._mean).div_(self._std), labels.long())


Data = Text | Images
"""A data set: an endless stream of samples for training, and fixed samples for validation, always the same."""


def read_digits() -> Parts:
    """Return 8 x 8 images of handwritten digits, 1,797 of them (see digits/LICENSE)."""
    path = Path(__file__).with_name("digits") / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.uint8))  # 64 pixels, and the digit
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1]
    test = torch.arange(len(labels)) % _TEST_SHARE == 0
    return {"train": (images[~test], labels[~test]), "test": (images[test], labels[test])}


def _varied(images: Tensor, seed: int, places: Tensor) -> Tensor:
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
    """Load a data set, one of `FITTING`. A text has samples of `context` bytes, and its folder may be a file."""
    if name == "text":
        assert context is not None
        return Text(context, file=folder if folder.is_file() else None, device=device)
    return Images(name, folder, device=device)


def check_fit(config: ModelConfig, name: str) -> None:
    """Raise ValueError if the model cannot be trained on this data. The data need not be loaded or downloaded."""
    if name not in FITTING:
        raise ValueError(f"data {name!r} is unknown, expected one of {', '.join(FITTING)}")
    shapes = config.inputs, model_config(FITTING[name]).inputs
    if shapes[0] != shapes[1]:
        takes, has = (" x ".join(map(str, shape)) or "bytes" for shape in shapes)
        advice = f"use model {FITTING[name]}, or other data"
        raise ValueError(f"model {config.name} takes {takes}, and {name} has {has}: {advice}")
    if (classes := getattr(config, "classes", 10)) < 10:
        raise ValueError(f"model {config.name}: expected classes=10 or more for {name}, got {classes}")
