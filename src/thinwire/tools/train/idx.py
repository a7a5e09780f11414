"""Reader of MNIST's and Fashion-MNIST's files, in the IDX format (http://yann.lecun.com/exdb/mnist), gzipped or not.

Fashion-MNIST is that of Xiao, Rasul and Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine
learning algorithms", 2017. It is never downloaded: Debian has a package of it.

4 bytes   magic: 0, 0, 8 for unsigned bytes, the number of dimensions
4 each    the dimensions, highest byte first: count, and for images rows and columns
rest      the values, exactly as many as the dimensions give
"""

import gzip
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from . import FASHION_FOLDER

FASHION_PACKAGE = "dataset-fashion-mnist"
PIXELS = 28
CLASSES = 10
LARGEST = 1_000_000
"""Largest number of samples that is read, whatever the header of a file says; the real files have at most 60,000."""


def files(part: str) -> tuple[str, str]:
    """Return the names of the files of images and labels of a part, "train" or "t10k"."""
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


FILES = (*files("train"), *files("t10k"))
_FIRST_LABELS = {
    "MNIST": bytes([5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5, 3, 6, 1, 7, 2, 8, 6, 9]),
    "Fashion-MNIST": bytes([9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9, 5, 5, 7, 9, 1, 0, 6, 4]),
}
"""First labels of the training images. They tell the two data sets apart, whose files have the same names and sizes."""


def find_mnist(folder: Path) -> dict[str, Path]:
    """Return the path of each file of MNIST; raise ValueError if the folder lacks one."""
    paths = _find(folder)
    if len(paths) < len(FILES):
        raise ValueError(
            f"{folder} has no {_missing(paths)}[.gz]; expected MNIST's files there, each with or without .gz: "
            f"{', '.join(FILES)}; put them there, or add --download"
        )
    return paths


def find_fashion(folder: Path) -> dict[str, Path]:
    """Return the path of each file of Fashion-MNIST; raise ValueError, with how to get it, if the folder lacks one."""
    paths = _find(folder)
    if len(paths) < len(FILES):
        raise ValueError(
            f"{folder} has no {_missing(paths)}[.gz] of Fashion-MNIST, which is not downloaded; apt-get install "
            f"{FASHION_PACKAGE} puts it into {FASHION_FOLDER}, or put {', '.join(FILES)}, each with or without .gz, "
            "into a folder; then name the folder by --data-dir"
        )
    return paths


def _find(folder: Path) -> dict[str, Path]:
    """Return the paths of those of `FILES` that the folder has, with or without .gz."""
    found = {name: [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()] for name in FILES}
    return {name: paths[0] for name, paths in found.items() if paths}


def _missing(paths: dict[str, Path]) -> str:
    return next(name for name in FILES if name not in paths)


def read_parts(paths: dict[str, Path], name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Read images (count, 1, 28, 28) and labels (count), both uint8, of "train" and of "test".

    Raises ValueError if a file is damaged or not of the data set `name`, "MNIST" or "Fashion-MNIST".
    """
    parts = {"train": _read_part(paths, "train"), "test": _read_part(paths, "t10k")}
    for other, first in _FIRST_LABELS.items():
        if other != name and parts["train"][1][: len(first)].numpy().tobytes() == first:
            raise ValueError(
                f"{paths[files('train')[1]]}: the labels of {other}, expected those of {name}, whose files have the "
                f"same names; give the folder of {name} by --data-dir"
            )
    return parts


def _read_part(paths: dict[str, Path], part: str) -> tuple[Tensor, Tensor]:
    images_path, labels_path = (paths[name] for name in files(part))
    images, labels = _read(images_path, (PIXELS, PIXELS)), _read(labels_path, ())
    if len(images) != len(labels):
        raise ValueError(
            f"{labels_path}: {len(labels)} labels, expected {len(images)}, the images in {images_path.name}"
        )
    if labels.max() >= CLASSES:
        raise ValueError(f"{labels_path}: label {int(labels.max())}, expected 0 to {CLASSES - 1}")
    return images[:, None], labels


def _read(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Read a file of samples of this shape, as uint8 with the count first; raise ValueError for other content."""
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


def _times(sizes: tuple[int, ...] | list[int]) -> str:
    return " x ".join(map(str, sizes)) + " pixels"
