"""What a data set is, what is drawn for its samples, and text: a file, or the sources of Python's standard library.

Samples form one endless stream, one epoch after another, of which each rank takes its part in every step. So four ranks
see the same samples as two ranks with twice the batch size, and a position in it is all that a run has to save.

Each number that is drawn is a hash of (seed, purpose, position, column), by the output function of SplitMix64 (Steele,
Lea and Flood, "Fast splittable pseudorandom number generators", 2014): the same in any batch and on any device.
"""

import lzma
import sysconfig
import zlib
from collections.abc import Iterator
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.kernels.reference.numbers import GOLDEN, mix, shift_right

_CPU = torch.device("cpu")
_VALIDATION_SHARE = 20  # One source file in 20, or the last twentieth of a file, is for validation
_VALIDATION_WINDOWS = 256
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def numbers(seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """Return whole numbers of 32 random bits, as int64 of shape (len(places), count).

    what     the purpose; different purposes have different numbers
    places   positions of the samples, on the device on which the numbers are drawn
    """
    key = int.from_bytes(blake2b(f"{what}/{seed}".encode(), digest_size=8).digest(), "big", signed=True)
    rows = mix(places * GOLDEN ^ key)
    columns = torch.arange(1, count + 1, device=places.device) * GOLDEN
    return shift_right(mix(rows[:, None] + columns), 32)


def below(limit: int, seed: int, what: str, places: Tensor, count: int) -> Tensor:
    """Return whole numbers from 0 to limit - 1, of shape (len(places), count); the limit is below 2^31."""
    return numbers(seed, what=what, places=places, count=count) * limit >> 32


def order(seed: int, length: int, start: int, size: int, device: torch.device = _CPU) -> Tensor:
    """Return the indices of the `size` samples from position `start` on. They are the same on every device."""
    parts, end = [], start + size
    while start < end:
        epoch, at = divmod(start, length)
        parts.append(_permutation(seed, length=length, epoch=epoch, device=device)[at : at + end - start])
        start += len(parts[-1])
    return torch.cat(parts)  # a copy, so that callers cannot change the cached order


@lru_cache(maxsize=2)  # a batch may span two epochs, and ranks that are threads may be in two epochs
def _permutation(seed: int, length: int, epoch: int, device: torch.device) -> Tensor:
    own = int(numbers(seed, what="order", places=torch.tensor([epoch]), count=1))
    return torch.randperm(length, generator=torch.Generator().manual_seed(own)).to(device)


class Batch(NamedTuple):
    """Inputs and targets of some samples."""

    inputs: Tensor
    targets: Tensor


class Text:
    """Windows of `context` bytes of Python sources, or of a file; the target at each position is the next byte.

    An epoch is the whole text, cut into windows without overlap, of which the first starts elsewhere in each epoch.
    """

    def __init__(self, context: int, *, file: Path | None = None, device: torch.device | str = "cpu") -> None:
        self._train, self._validation = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device)
            for part in (sources() if file is None else file_parts(file))
        )
        self._context = context
        if not 1 <= context <= min(len(self._train), len(self._validation)) // 2:
            raise ValueError(f"context {context}, expected 1 to half of the {len(self._validation)} bytes of text")
        self.length = len(self._train) // context - 1  # the last is left out: offset and last target need room
        starts = torch.linspace(0, len(self._validation) - context - 1, _VALIDATION_WINDOWS, dtype=torch.float64)
        self._starts = starts.long().to(device)  # drawn on the CPU: a GPU has other bits

    def batch(self, start: int, size: int, seed: int) -> Batch:
        """Return `size` windows from position `start` of the stream."""
        windows = order(seed, length=self.length, start=start, size=size, device=self._train.device)
        epochs = torch.arange(start, start + size, device=self._train.device) // self.length
        offsets = below(self._context, seed=seed, what="offset", places=epochs, count=1).view(-1)
        return self._cut(self._train, offsets + windows * self._context)

    def validation(self, size: int) -> Iterator[Batch]:
        """Yield windows that are spread evenly over the validation text."""
        for part in self._starts.split(size):
            yield self._cut(self._validation, part)

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(self._context + 1, device=text.device)].long()
        return Batch(windows[:, :-1], windows[:, 1:])


@torch.no_grad()
def evaluate_batch(model: nn.Module, batch: Batch, device: torch.device) -> tuple[float, float, int]:
    """Return the sum of the losses, the number of correct predictions, and the number of targets."""
    inputs, targets = (part.to(device) for part in batch)
    scores, wanted = model(inputs).flatten(0, -2).float(), targets.flatten()
    right = (scores.argmax(dim=-1) == wanted).sum().item()
    return F.cross_entropy(scores, wanted, reduction="sum").item(), float(right), wanted.numel()


def file_parts(path: Path) -> tuple[bytes, bytes]:
    """Return the bytes of a file, which may be one of .xz, for training, and its last twentieth for validation."""
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    cut = len(text) - len(text) // _VALIDATION_SHARE
    return text[:cut], text[cut:]


@cache
def sources() -> tuple[bytes, bytes]:
    """Return the standard library's sources without its tests, for training and for validation, by the files' names."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    parts: tuple[list[bytes], list[bytes]] = [], []
    for name in sorted(found):
        if not _NOT_LIBRARY & set(name.split("/")):
            parts[zlib.crc32(name.encode()) % _VALIDATION_SHARE == 0].append(found[name].read_bytes())
    train, validation = map(b"".join, parts)
    return train, validation
