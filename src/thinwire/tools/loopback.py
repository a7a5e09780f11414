"""The loopback interface: what it has sent, and whether it is quiet. Linux counts; elsewhere all counts are 0."""

import re
import time
from pathlib import Path

_COUNTERS = Path("/proc/net/dev")
_WINDOW_SECONDS = 0.01
_PATIENCE_SECONDS = 0.2
"""TCP acknowledges within 0.04."""


def is_counted() -> bool:
    return _COUNTERS.exists()


def sent_bytes() -> int:
    """Since the system started, by all processes, headers included."""
    line = re.search(r"\blo:(.*)", _COUNTERS.read_text()) if is_counted() else None
    return int(line[1].split()[8]) if line else 0


def wait_until_quiet() -> tuple[bool, int]:
    """Whether a moment without traffic came soon, and the count then."""
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
