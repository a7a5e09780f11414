"""MNIST's files, in the format IDX (http://yann.lecun.com/exdb/mnist), gzipped or not.

4 bytes   magic: 0, 0, 8 for unsigned bytes, the number of dimensions
4 each    the dimensions, highest byte first: count, and for images rows and columns
rest      the values, as many as the dimensions say and not one more
"""

import gzip
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

PIXELS = 28
CLASSES = 10
LARGEST = 1_000_000
"""Samples in a file; MNIST has 60,000. What a header asks for is not read without a limit."""


def files(part: str) -> tuple[str, str]:
    """The names of images and labels of a part, "train" or "t10k".

    >>> files("t10k")
    ('t10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte')
    """
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


def read_part(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images (count, 1, 28, 28) and labels (count), both uint8."""
    paths = [_found(folder, name) for name in files(part)]
    images, labels = read_idx(paths[0], (PIXELS, PIXELS)), read_idx(paths[1], ())
    if len(images) != len(labels):
        raise ValueError(f"{paths[1]}: {len(labels)} labels, expected {len(images)}, the images in {paths[0].name}")
    if labels.max() >= CLASSES:
        raise ValueError(f"{paths[1]}: label {int(labels.max())}, expected 0 to {CLASSES - 1}")
    return images[:, None], labels


def read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """A file of samples of this shape, as uint8 with the count in front; ValueError if it is anything else."""
    header, magic = 4 * (2 + len(shape)), 0x0800 + 1 + len(shape)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(header)
            if len(head) < header:
                raise ValueError(f"{path}: {len(head)} bytes, expected a header of {header}")
            found, count, *sizes = struct.unpack(f">{header // 4}I", head)
            if found != magic:
                raise ValueError(f"{path}: magic {found:#010x}, expected {magic:#010x}")
            if tuple(sizes) != shape:
                raise ValueError(f"{path}: samples of {_times(sizes)}, expected {_times(shape)}")
            if not 1 <= count <= LARGEST:
                raise ValueError(f"{path}: {count:,} samples, expected 1 to {LARGEST:,}")
            expected = count * torch.Size(shape).numel()
            body = file.read(expected + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: {error}, expected a whole gzip file") from error
    if len(body) != expected:
        given = "more" if len(body) > expected else f"{len(body):,}"
        raise ValueError(f"{path}: {given} bytes after the header, expected {expected:,} for {count:,} samples")
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(count, *shape)


def _found(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    expected = ", ".join(name for part in ("train", "t10k") for name in files(part))
    raise ValueError(
        f"{folder} has no {name}[.gz]; expected MNIST's files there, each with or without .gz: {expected}; "
        "put them there, or add --download"
    )


def _times(sizes: tuple[int, ...] | list[int]) -> str:
    return " x ".join(map(str, sizes)) + " pixels"
