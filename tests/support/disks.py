"""A small disk that can be filled."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(path: Path, size: str = "3m") -> Iterator[Path]:
    """Mount a disk of this size at a new folder. Raise PermissionError, with the reason, where this is not possible."""
    if os.name != "posix" or os.geteuid() != 0 or not Path("/proc/mounts").exists():
        raise PermissionError("a small disk is mounted by root, on Linux")
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if made.returncode != 0:
        raise PermissionError(f"mount is not permitted: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=30)
