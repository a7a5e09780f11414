"""Data sets by name, and a check that a model fits one of them."""

from pathlib import Path

import torch

from .data import Data, Digits, Text
from .images import CIFAR10, MNIST, FashionMNIST
from .models import GPTConfig, ModelConfig, ResNet18Config

FOLDERS: dict[str, type[MNIST | FashionMNIST | CIFAR10]] = {
    "mnist": MNIST, "fashion-mnist": FashionMNIST, "cifar10": CIFAR10,
}  # fmt: skip
"""Image data sets that are read from a folder."""
IMAGES: dict[str, type[Digits | MNIST | FashionMNIST | CIFAR10]] = {"digits": Digits, **FOLDERS}
DATASETS = ("text", *IMAGES)


def load_data(name: str, folder: Path, context: int | None = None, *, device: torch.device | str = "cpu") -> Data:
    """Load one of `DATASETS`: those in `FOLDERS` from a folder, the others from Python's or thinwire's files.

    folder    the folder of the images; for text, a file that is read in place of Python's sources
    context   number of bytes in a sample of text, as many as the model sees at once; None for images
    device    device of the data and of the batches; the samples do not depend on it

    >>> load_data("digits", Path("data")).length
    1437
    """
    _check_name(name)
    if (context is None) == (name == "text"):
        raise ValueError(f"data {name} with context {context}, expected a number for text and none for images")
    if context is not None:
        return Text(context, file=folder if folder.is_file() else None, device=device)
    return Digits(device=device) if name == "digits" else FOLDERS[name](folder, device=device)


def check_fit(config: ModelConfig, name: str) -> None:
    """Raise ValueError if the model cannot be trained on this data. The data need not be loaded or downloaded.

    >>> from thinwire.tools.train.models import model_config
    >>> check_fit(model_config("cnn:size=8"), "mnist")
    Traceback (most recent call last):
        ...
    ValueError: model cnn takes images of 1 x 8 x 8, and mnist has 1 x 28 x 28: use model cnn:size=28, or data digits
    """
    _check_name(name)
    if name == "text":
        if not isinstance(config, GPTConfig):
            others = _others(config.inputs)
            raise ValueError(f"model {config.name} takes images, and text has none: use model gpt, or {others}")
        return
    data = IMAGES[name]
    if isinstance(config, GPTConfig):
        raise ValueError(f"model gpt takes text, and {name} has images: use model {_cnn(name)}, or data text")
    if config.inputs != data.inputs:
        raise ValueError(
            f"model {config.name} takes images of {_times(config.inputs)}, and {name} has {_times(data.inputs)}: "
            f"use model {'resnet18 or ' if data.inputs == ResNet18Config.inputs else ''}{_cnn(name)}, "
            f"or {_others(config.inputs)}"
        )
    if config.classes < data.classes:
        raise ValueError(f"model {config.name} with classes={config.classes}, but {name} has {data.classes} classes")


def _check_name(name: str) -> None:
    if name not in DATASETS:
        raise ValueError(f"data {name!r} is unknown, expected one of {', '.join(DATASETS)}")


def _cnn(name: str) -> str:
    """Return the spec of a CNN for these images."""
    channels, size, _ = IMAGES[name].inputs
    return f"cnn:size={size}" if channels == 1 else f"cnn:channels={channels},size={size}"


def _others(inputs: tuple[int, ...]) -> str:
    """Return the data with images of this shape, as text for an error message."""
    fitting = [name for name, data in IMAGES.items() if data.inputs == inputs]
    return f"data {' or '.join(fitting)}" if fitting else "other data"


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
