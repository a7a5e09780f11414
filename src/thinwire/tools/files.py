"""Files that are written whole or not at all, and their SHA-256."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` at the end of the block: a reader sees the old or the new file.

    It is synced to disk first, so this also holds after a crash. If the block raises an exception, `path` stays as it
    was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as file:
        file.write(text.encode())


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits; raise OSError if it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
