"""A choice of "auto" that does not depend on how long anything took."""

from typing import Any

import thinwire


def force(sync: thinwire.Synchronizer, best: int) -> None:
    """Let the compressor of this number be the quickest, by what ranks say that they have measured."""
    trials: Any = sync.assignment
    seconds = [1.0 if number == best else 2.0 for number in range(len(trials.compressors))]
    trials.seconds = lambda: seconds
