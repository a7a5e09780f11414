"""The bytes that a network interface of this machine has sent. Only Linux counts them; elsewhere it is 0."""

import re
from pathlib import Path

_COUNTERS = Path("/proc/net/dev")


def sent_bytes(interface: str = "lo") -> int:
    """Return the bytes sent since the system started, by all processes, headers included."""
    line = re.search(rf"\b{interface}:(.*)", _COUNTERS.read_text()) if _COUNTERS.exists() else None
    return int(line[1].split()[8]) if line else 0
