"""Counters of the loopback interface, or of another one: the bytes sent, and whether traffic has stopped.

Only Linux has these counters. On other systems every count is 0.
"""

import re
import time
from pathlib import Path
from typing import NamedTuple

_COUNTERS = Path("/proc/net/dev")
_WINDOW_SECONDS = 0.01
_PATIENCE_SECONDS = 0.2
"""Longest wait for a quiet moment. TCP acknowledges within 0.04 s."""


def is_counted() -> bool:
    """Return whether the system has counters of the loopback interface."""
    return _COUNTERS.exists()


def sent_bytes(interface: str = "lo") -> int:
    """Return the bytes sent since the system started, by all processes, headers included."""
    line = re.search(rf"\b{interface}:(.*)", _COUNTERS.read_text()) if is_counted() else None
    return int(line[1].split()[8]) if line else 0


class Counter(NamedTuple):
    """Counts the bytes that one rank sends."""

    interface: str
    times: int
    """How many times the interface counts a byte that a rank sends; on one of all ranks, their number."""

    def sent_bytes(self) -> int:
        """Return the bytes that a rank has sent since the system started, on average, headers included."""
        return sent_bytes(self.interface) // self.times


def wait_until_quiet() -> tuple[bool, int]:
    """Wait briefly for a moment without traffic. Return whether it came, and the bytes sent until then."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while is_counted():
        before = sent_bytes()
        time.sleep(_WINDOW_SECONDS)
        after = sent_bytes()
        if before == after:
            return True, after
        if time.monotonic() > deadline:
            break
    return False, sent_bytes()
