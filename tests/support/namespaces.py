"""What is there of a process's namespaces, and waiting until it is gone."""

import os
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = Path("/run/netns")


def ours(process: int | None = None) -> set[str]:
    """Names of the namespaces that a process, by default this one, has made."""
    return {path.name for path in FOLDER.glob(f"thinwire-{process or os.getpid()}-*")}


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
