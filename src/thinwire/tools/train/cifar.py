"""Reader of CIFAR-10's binary version (https://www.cs.toronto.edu/~kriz/cifar.html), as an archive or as its files.

A file is a sequence of records of 3,073 bytes: the label, then 32 x 32 red, green and blue values, row by row. The
version for Python is not read, because pickles can run any code. Nothing of the archive is written to disk.
"""

import gzip
import tarfile
import zlib
from pathlib import Path

import torch
from torch import Tensor

CLASSES = 10
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
LARGEST = 10_000 * RECORD
"""Largest size of a file in bytes; each of the real files has this size."""
ARCHIVE, FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
TRAIN, TEST = tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"
_ROOM = 1 << 20
"""Bytes allowed for the rest of the archive: a page of text, a list of names, headers."""


def read_cifar(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return images (count, 3, 32, 32) and labels (count), both uint8, of "train" and "test"; refuse damaged files."""
    contents = _contents(folder)
    parts = {name: _records(where, content) for name, (where, content) in contents.items()}
    images, labels = map(torch.cat, zip(*(parts[name] for name in TRAIN), strict=True))
    return {"train": (images, labels), "test": parts[TEST]}


def _contents(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return the location of each file, for messages, and its content."""
    for place in (folder / FOLDER, folder):
        paths = [place / name for name in (*TRAIN, TEST)]
        if all(path.is_file() for path in paths):
            return {path.name: (str(path), _limited(path)) for path in paths}
    if (folder / ARCHIVE).is_file():
        return _unpacked(folder / ARCHIVE)
    raise ValueError(
        f"{folder} has no {ARCHIVE}; expected it there, CIFAR-10's binary version, or the files in it: "
        f"{', '.join((*TRAIN, TEST))}; put it there, or add --download"
    )


def _limited(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LARGEST + 1)


def _unpacked(path: Path) -> dict[str, tuple[str, bytes]]:
    expected = {f"{FOLDER}/{name}": name for name in (*TRAIN, TEST)}
    contents: dict[str, tuple[str, bytes]] = {}
    try:
        with _Limited(path) as unzipped, tarfile.open(fileobj=unzipped, mode="r|") as archive:
            for member in archive:
                if member.name not in expected:
                    continue
                where, name = f"{member.name} in {path}", expected[member.name]
                if name in contents:
                    raise ValueError(f"{where}: found twice, expected once")
                file = archive.extractfile(member) if member.isreg() else None  # a link would be followed
                if file is None:
                    raise ValueError(f"{where}: not a plain file")
                contents[name] = where, file.read(LARGEST + 1)
            while unzipped.read(_ROOM):  # gzip's checksum comes after the end of the archive
                pass
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: {error}, expected a whole .tar.gz") from error
    missing = [name for name in (*TRAIN, TEST) if name not in contents]
    if missing:
        raise ValueError(f"{path}: without {FOLDER}/{missing[0]}, expected CIFAR-10's binary version")
    return contents


class _Limited(gzip.GzipFile):
    """A gzip file that raises ValueError if it unpacks to more than CIFAR-10: a few kilobytes could, to any size."""

    def read(self, size: int | None = -1) -> bytes:
        piece = super().read(size)
        if self.tell() > 6 * LARGEST + _ROOM:
            raise ValueError(f"{self.name}: unpacks to more than CIFAR-10, which is {6 * LARGEST:,} bytes")
        return piece


def _records(where: str, content: bytes) -> tuple[Tensor, Tensor]:
    if len(content) > LARGEST:
        raise ValueError(f"{where}: more than {LARGEST:,} bytes, expected at most {LARGEST // RECORD:,} records")
    if not content or len(content) % RECORD:
        raise ValueError(
            f"{where}: {len(content):,} bytes, expected records of {RECORD:,}, up to {LARGEST:,} bytes of them"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, RECORD)
    labels = records[:, 0].clone()
    if labels.max() >= CLASSES:
        raise ValueError(f"{where}: label {int(labels.max())}, expected 0 to {CLASSES - 1}")
    return records[:, 1:].reshape(-1, *SHAPE), labels
