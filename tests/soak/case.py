"""What a case reports, and the ranks that all cases share."""

import atexit
from functools import cache
from typing import NamedTuple

from thinwire.testing import RankPool


class Tried(NamedTuple):
    what: str
    counts: dict[str, int]
    """How much was tried, by name: frames, kills, steps ..."""


class Skipped(Exception):
    """Raised by a kind that this machine has no means for; the text says why."""


@cache
def ranks() -> RankPool:
    pool = RankPool(warnings="error")
    atexit.register(pool.close)
    return pool
