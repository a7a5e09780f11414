"""Data that every machine has: the sources of Python's standard library, and the handwritten digits of scikit-learn.

The batch of all ranks together depends on the seed and the step alone, and each rank takes its part of it. So a run can
be repeated and resumed, two recipes see the same data, and four ranks see what two with twice the batch would.
"""

import sysconfig
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_VALIDATION_SHARE = 20
"""One file in so many is kept for validation; of the digits, one in `_TEST_SHARE`."""
_TEST_SHARE = 5
_NOISY_DRAWS = 10
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class Batch(NamedTuple):
    inputs: Tensor
    targets: Tensor


class Data(Protocol):
    def batch(self, step: int, rank: int, world: int, seed: int, size: int) -> Batch:
        """`size` samples for this rank, of size * world that are drawn by (seed, step)."""

    def validation(self, size: int) -> Iterator[Batch]:
        """Always the same samples, none of which is in a batch; `size` at a time."""


class Text:
    """Windows of `context` bytes of Python sources; the target is the next byte at each place."""

    def __init__(self, context: int, validation_windows: int = 256) -> None:
        self._train, self._validation = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in sources())
        self._context, self._windows = context, validation_windows
        shortest = min(len(self._train), len(self._validation))
        if shortest <= context:
            raise ValueError(f"context {context}, but there are only {shortest} bytes of text: make it shorter")

    def batch(self, step: int, rank: int, world: int, seed: int, size: int) -> Batch:
        starts = _drawn(len(self._train) - self._context, step, rank, world, seed, size)
        return self._cut(self._train, starts)

    def validation(self, size: int) -> Iterator[Batch]:
        """Windows spread evenly over the text."""
        room = len(self._validation) - self._context - 1
        starts = torch.linspace(0, room, self._windows, dtype=torch.float64).long()
        for part in starts.split(size):
            yield self._cut(self._validation, part)

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(self._context + 1)].long()
        return Batch(windows[:, :-1], windows[:, 1:])


class Digits:
    """8 x 8 images of handwritten digits, 1,797 of them; the target is the digit.

    noise   standard deviation of what is added to every pixel, anew in every batch. White is 1 and black 0: with 0.5 no
            model is ever sure, so that losses of different trainings can be told apart.
    """

    def __init__(self, noise: float = 0.0) -> None:
        self._noise = noise
        from sklearn.datasets import load_digits  # slow to load

        images, digits = load_digits(return_X_y=True)
        inputs = torch.from_numpy(images).float().div(16).view(-1, 1, 8, 8)
        targets = torch.from_numpy(digits).long()
        kept = torch.arange(len(targets)) % _TEST_SHARE == 0
        self._train, self._test = Batch(inputs[~kept], targets[~kept]), Batch(inputs[kept], targets[kept])

    def batch(self, step: int, rank: int, world: int, seed: int, size: int) -> Batch:
        chosen = _drawn(len(self._train.targets), step, rank, world, seed, size)
        return Batch(self._noisy(self._train.inputs[chosen], f"{seed}/{step}/{rank}"), self._train.targets[chosen])

    def validation(self, size: int) -> Iterator[Batch]:
        """With noise each image comes several times, with other noise."""
        for draw in range(_NOISY_DRAWS if self._noise else 1):
            inputs = self._noisy(self._test.inputs, f"validation {draw}")
            yield from map(Batch, inputs.split(size), self._test.targets.split(size))

    def _noisy(self, images: Tensor, draw: str) -> Tensor:
        if not self._noise:
            return images
        generator = torch.Generator().manual_seed(zlib.crc32(draw.encode()))
        return images + self._noise * torch.randn(images.shape, generator=generator)


@cache
def sources() -> tuple[bytes, bytes]:
    """The standard library's sources, for training and for validation, file after file in the order of their names.

    Tests of the library are left out. Which part a file belongs to depends on its name alone.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    parts: tuple[list[bytes], list[bytes]] = [], []
    for name in sorted(found):
        if not _NOT_LIBRARY & set(name.split("/")):
            parts[zlib.crc32(name.encode()) % _VALIDATION_SHARE == 0].append(found[name].read_bytes())
    train, validation = map(b"".join, parts)
    if not validation:
        raise ValueError(f"no Python sources in {root}: this Python was installed without its standard library's text")
    return train, validation


def _drawn(count: int, step: int, rank: int, world: int, seed: int, size: int) -> Tensor:
    """This rank's part of size * world numbers below `count`."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world}, expected 0 to {world - 1}")
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{step}".encode()))
    return torch.randint(count, (world, size), generator=generator)[rank]
