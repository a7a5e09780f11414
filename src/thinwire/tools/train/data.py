"""What a data set is, and text: a file, or the sources of Python's standard library.

Samples form one endless stream, which depends only on the seed, and of which each rank takes its part in every step. So
four ranks see the same samples as two ranks with twice the batch size.
"""

import gzip
import lzma
import sysconfig
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .draws import below, order

_VALIDATION_SHARE = 20
"""One source file in 20, or the last twentieth of a file, is for validation."""
_VALIDATION_WINDOWS = 256
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class Batch(NamedTuple):
    """Inputs and targets of some samples."""

    inputs: Tensor
    targets: Tensor


class Data(Protocol):
    """A data set: an endless stream of samples for training, and fixed samples for validation."""

    @property
    def length(self) -> int:
        """Return the number of samples in an epoch."""

    def batch(self, start: int, size: int, seed: int) -> Batch:
        """Return the samples from position `start` to start + size - 1 of the stream, one epoch after another.

        Rank r of P takes the batch that starts at consumed + r * size, and a step consumes P * size samples.
        """

    def validation(self, size: int) -> Iterator[Batch]:
        """Yield the validation samples, at most `size` at a time: always the same, and never in a training batch."""


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
        shortest = min(len(self._train), len(self._validation))
        if not 1 <= context <= shortest // 2:
            raise ValueError(
                f"context {context}, but there are only {shortest} bytes of text: expected 1 to half of it"
            )
        self.length = len(self._train) // context - 1  # the last is left out: offset and last target need room

    def batch(self, start: int, size: int, seed: int) -> Batch:
        """Return `size` windows from position `start` of the stream."""
        windows = order(seed, length=self.length, start=start, size=size, device=self._train.device)
        epochs = torch.arange(start, start + size, device=self._train.device) // self.length
        offsets = below(self._context, seed=seed, what="offset", places=epochs, count=1).view(-1)
        return self._cut(self._train, offsets + windows * self._context)

    def validation(self, size: int) -> Iterator[Batch]:
        """Yield windows that are spread evenly over the validation text."""
        room = len(self._validation) - self._context - 1
        device = self._train.device
        starts = torch.linspace(0, room, _VALIDATION_WINDOWS, dtype=torch.float64).long()  # not on a GPU: other bits
        if device.type == "cuda":
            starts = starts.pin_memory().to(device, non_blocking=True)
        for part in starts.split(size):
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
    """Return the bytes of a file for training, and its last twentieth for validation; .xz and .gz are unpacked."""
    unpack = {".xz": lzma.decompress, ".gz": gzip.decompress}.get(path.suffix, bytes)
    try:
        text = unpack(path.read_bytes())
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"the text {path} cannot be read: {error}") from None
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
    if not validation:
        raise ValueError(f"no Python sources in {root}: this Python was installed without its standard library's text")
    return train, validation
