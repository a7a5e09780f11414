"""Counters of the bytes that the loopback interface, or another one, has sent.

Only Linux has these counters. On other systems every count is 0.
"""

import re
from pathlib import Path

_COUNTERS = Path("/proc/net/dev")


def is_counted() -> bool:
    """Return whether the system has counters of the loopback interface."""
    return _COUNTERS.exists()


def sent_bytes(interface: str = "lo") -> int:
    """Return the bytes sent since the system started, by all processes, headers included."""
    line = re.search(rf"\b{interface}:(.*)", _COUNTERS.read_text()) if is_counted() else None
    return int(line[1].split()[8]) if line else 0
