"""Cases in turn, each kind for its share of the time, with a state that can be stopped and resumed at any moment."""

import atexit
import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from thinwire.testing import RankPool
from thinwire.tools.files import replace_text


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


Kinds = Mapping[str, tuple[Callable[[Random], Tried], int]]
"""(function, share of the time) by name."""


class Campaign:
    """path   JSON file with the state; it is resumed if it exists."""

    def __init__(self, kinds: Kinds, seed: str, path: Path) -> None:
        self.kinds, self.seed, self.path = kinds, seed, path
        self.state: dict[str, Any] = {"seed": seed, "cases": {}, "seconds": {}, "counts": {}, "failures": {}}
        if path.exists():
            self.state = json.loads(path.read_text())
            if self.state["seed"] != seed:
                raise ValueError(f"{path} is of seed {self.state['seed']}, expected {seed}: give another --state")
        self.skipped: dict[str, str] = {}

    def run(self, seconds: float) -> None:
        """Run cases for so long, and each kind at least once."""
        end, tried = time.monotonic() + seconds, set()
        while time.monotonic() < end or {*self.kinds} - tried - {*self.skipped}:
            left = [kind for kind in self.kinds if kind not in self.skipped]
            first = [kind for kind in left if kind not in tried] or left
            kind = min(first, key=lambda kind: self.state["seconds"].get(kind, 0.0) / self.kinds[kind][1])
            self.run_next(kind)
            tried.add(kind)

    def run_next(self, kind: str) -> None:
        """Run the next case of a kind, and write the state."""
        number = self.state["cases"].get(kind, 0)
        started, case = time.monotonic(), f"{kind}:{self.seed}/{number}"
        try:
            tried = run_case(self.kinds, case)
        except Skipped as reason:
            self.skipped[kind] = str(reason)
            print(f"{case} skipped: {reason}", flush=True)
            return
        except Exception as error:
            traceback.print_exc()
            tried = Tried(f"FAILED: {type(error).__name__}; repeat it by: make soak CASE={case}", {})
            self.state["failures"][case] = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        print(f"{case} {seconds:.1f} s: {tried.what}", flush=True)
        self.state["counts"] = Counter(self.state["counts"]) + Counter(tried.counts)
        self.state["cases"][kind] = number + 1
        self.state["seconds"][kind] = self.state["seconds"].get(kind, 0.0) + seconds
        replace_text(self.path, json.dumps(self.state, indent=1))

    def summary(self) -> str:
        """Return the counts of the whole campaign, and its failures."""
        minutes = sum(self.state["seconds"].values()) / 60
        made = [f"seed {self.seed}, {minutes:.1f} minutes, {sum(self.state['cases'].values()):,} cases"]
        made += [f"{count:>14,} {name}" for name, count in self.state["counts"].items()]
        made += [f"skipped {kind}: {reason}" for kind, reason in self.skipped.items()]
        made += [f"FAILED {case}: {error.splitlines()[0]}" for case, error in self.state["failures"].items()]
        return "\n".join([*made, f"{len(self.state['failures'])} failures; {self.path} resumes it"])


def run_case(kinds: Kinds, case: str) -> Tried:
    """Run one case by its name, KIND:SEED/NUMBER. What it does is drawn from that name alone."""
    kind = case.partition(":")[0]
    if kind not in kinds:
        raise ValueError(f"case {case}, expected KIND:SEED/NUMBER with a kind of {', '.join(kinds)}")
    return kinds[kind][0](Random(case))
