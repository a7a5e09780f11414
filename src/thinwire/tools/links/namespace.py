"""Moves a thread into a network namespace."""

import ctypes
from pathlib import Path

FOLDER = Path("/run/netns")
"""Where `ip netns` keeps a file for each namespace."""
_CLONE_NEWNET = 0x40000000


def enter(name: str) -> None:
    """Move the calling thread, and all threads that it starts from now on, into the namespace of this name."""
    with open(FOLDER / name, encoding="utf-8") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {file.name}")
