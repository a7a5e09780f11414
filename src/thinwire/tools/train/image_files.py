"""Readers of MNIST, Fashion-MNIST and CIFAR-10: "train" and "test" of each are images and labels, both uint8.

MNIST and Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017) are in IDX files, gzipped or not:

    4 bytes   magic: 0, 0, 8 for unsigned bytes, the number of dimensions
    4 each    the dimensions, highest byte first: count, and for images rows and columns
    rest      the values, exactly as many as the dimensions give

CIFAR-10's binary version, as an archive or as its files, has records of 3,073 bytes: the label, then 32 x 32 red, green
and blue values. The version for Python is not read, because pickles can run any code. Nothing is unpacked to disk.
"""

import io
import struct
import tarfile
import zlib
from pathlib import Path

import torch
from torch import Tensor

from . import FASHION_FOLDER

FASHION_PACKAGE = "dataset-fashion-mnist"
CLASSES = 10
MNIST_SHAPE, CIFAR_SHAPE = (1, 28, 28), (3, 32, 32)
LARGEST = 1_000_000
"""Largest number of samples in an IDX file, whatever its header says; the real files have at most 60,000."""
RECORD = 1 + 3 * 32 * 32
CIFAR_NBYTES = 10_000 * RECORD
"""Largest size of a file of CIFAR-10; each of the real files has this size."""
CIFAR_ARCHIVE, CIFAR_FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
CIFAR_TRAIN, CIFAR_TEST = tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"
CIFAR_FILES = (*CIFAR_TRAIN, CIFAR_TEST)
_ROOM = 1 << 20
"""Bytes allowed for the rest of the archive: a page of text, a list of names, headers."""

Parts = dict[str, tuple[Tensor, Tensor]]


def mnist_files(part: str) -> tuple[str, str]:
    """Return the names of the files of images and labels of a part, "train" or "t10k"."""
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


MNIST_FILES = (*mnist_files("train"), *mnist_files("t10k"))
_FIRST_LABELS = {
    "MNIST": bytes([5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5, 3, 6, 1, 7, 2, 8, 6, 9]),
    "Fashion-MNIST": bytes([9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9, 5, 5, 7, 9, 1, 0, 6, 4]),
}
"""First labels of the training images. They tell the two data sets apart, whose files have the same names and sizes."""
_ADVICE = {
    "MNIST": "put them there, or add --download",
    "Fashion-MNIST": f"they are not downloaded; apt-get install {FASHION_PACKAGE} puts them into {FASHION_FOLDER}: "
    "name the folder by --data-dir",
}


def read_mnist(folder: Path, name: str = "MNIST") -> Parts:
    """Read MNIST or Fashion-MNIST; raise ValueError if a file is missing, damaged or of the other one."""
    paths = find_mnist(folder, name)
    prefixes = {"train": "train", "test": "t10k"}
    parts = {part: _read_part(*(paths[file] for file in mnist_files(prefix))) for part, prefix in prefixes.items()}
    for other, first in _FIRST_LABELS.items():
        if other != name and parts["train"][1][: len(first)].numpy().tobytes() == first:
            raise ValueError(
                f"{paths[mnist_files('train')[1]]}: the labels of {other}, expected those of {name}, whose files have "
                f"the same names; give the folder of {name} by --data-dir"
            )
    return parts


def find_mnist(folder: Path, name: str) -> dict[str, Path]:
    """Return the path of each file, with or without .gz; raise ValueError, with how to get it, if one is missing."""
    found = {}
    for file in MNIST_FILES:
        there = [path for path in (folder / file, folder / f"{file}.gz") if path.is_file()]
        if not there:
            raise ValueError(
                f"{folder} has no {file}[.gz] of {name}; expected {', '.join(MNIST_FILES)} there, each with or without "
                f".gz; {_ADVICE[name]}"
            )
        found[file] = there[0]
    return found


def _read_part(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    images, labels = _read_idx(images_path, MNIST_SHAPE[1:]), _read_idx(labels_path, ())
    if len(images) != len(labels):
        raise ValueError(
            f"{labels_path}: {len(labels)} labels, expected {len(images)}, the images in {images_path.name}"
        )
    _check_labels(labels, str(labels_path))
    return images[:, None], labels


def _read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    header, per_sample = 4 * (2 + len(shape)), torch.Size(shape).numel()
    content = _content(path, header + LARGEST * per_sample)
    expected = struct.pack(f">I{len(shape)}I", 0x0801 + len(shape), *shape)
    if len(content) < header or content[:4] + content[8:header] != expected:
        raise ValueError(
            f"{path}: header {content[:header].hex()}, expected one of {len(shape) + 1} dimensions of bytes"
        )
    count = int.from_bytes(content[4:8], "big")
    if count < 1 or len(content) != header + count * per_sample:
        raise ValueError(
            f"{path}: {len(content) - header:,} bytes after the header, expected {count * per_sample:,} for {count:,} "
            "samples, at least 1"
        )
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).view(count, *shape)


def read_cifar(folder: Path) -> Parts:
    """Read CIFAR-10; raise ValueError if a file is missing or damaged."""
    parts = {name: _records(content, where) for name, (where, content) in _cifar_contents(folder).items()}
    images, labels = map(torch.cat, zip(*(parts[name] for name in CIFAR_TRAIN), strict=True))
    return {"train": (images, labels), "test": parts[CIFAR_TEST]}


def _cifar_contents(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return the location of each file, for messages, and its content."""
    for place in (folder / CIFAR_FOLDER, folder):
        paths = [place / name for name in CIFAR_FILES]
        if all(path.is_file() for path in paths):
            return {path.name: (str(path), _content(path, CIFAR_NBYTES)) for path in paths}
    archive = folder / CIFAR_ARCHIVE
    if not archive.is_file():
        raise ValueError(
            f"{folder} has no {CIFAR_ARCHIVE}; expected CIFAR-10's binary version there, or the files in it: "
            f"{', '.join(CIFAR_FILES)}; put it there, or add --download"
        )
    found = {}
    try:
        with tarfile.open(
            fileobj=io.BytesIO(_content(archive, len(CIFAR_FILES) * CIFAR_NBYTES + _ROOM)), mode="r:"
        ) as tar:
            for name in CIFAR_FILES:
                member = tar.getmember(f"{CIFAR_FOLDER}/{name}")
                file = tar.extractfile(member) if member.isreg() else None  # a link would be followed
                if file is None:
                    raise ValueError(f"{archive}: {member.name} is not a plain file")
                found[name] = f"{member.name} in {archive}", file.read()
    except (tarfile.TarError, KeyError) as error:
        raise ValueError(f"{archive}: {error}, expected CIFAR-10's binary version") from None
    return found


def _records(content: bytes, where: str) -> tuple[Tensor, Tensor]:
    if not content or len(content) % RECORD or len(content) > CIFAR_NBYTES:
        raise ValueError(f"{where}: {len(content):,} bytes, expected 1 to 10,000 records of {RECORD:,}")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, RECORD)
    labels = records[:, 0].clone()
    _check_labels(labels, where)
    return records[:, 1:].reshape(-1, *CIFAR_SHAPE), labels


def _check_labels(labels: Tensor, where: str) -> None:
    if labels.max() >= CLASSES:
        raise ValueError(f"{where}: label {int(labels.max())}, expected 0 to {CLASSES - 1}")


def _content(path: Path, most: int) -> bytes:
    """Return the content of a file, unpacked if it ends in .gz; raise ValueError for more than `most` bytes."""
    with path.open("rb") as file:
        content, is_whole = file.read(most + 1), True
    if path.suffix == ".gz":
        unpacker = zlib.decompressobj(wbits=31)  # a few kilobytes may unpack to any size
        try:
            content = unpacker.decompress(content, most + 1)
        except zlib.error as error:
            raise ValueError(f"{path}: {error}, expected a whole gzip file") from None
        is_whole = unpacker.eof
    if len(content) > most:
        raise ValueError(f"{path}: more than {most:,} bytes")
    if not is_whole:
        raise ValueError(f"{path}: cut off, expected a whole gzip file")
    return content
