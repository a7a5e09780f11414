"""Whether "auto" is never much slower than dense: both in the same processes over the lab's links, turn by turn.

    python benchmarks/link_auto.py [RATE ...]              # such as 100mbit 10gbit; needs root and iproute2

A method makes its choice first, then takes turns of a few steps with DDP as it is. Printed are medians of turns, of the
quotient of each turn and its neighbour, and what was chosen.
"""

import sys
from statistics import median

from thinwire.testing.pool import Workers
from thinwire.tools.bench.link.rank import LinkRank
from thinwire.tools.bench.link.settings import Model
from thinwire.tools.bench.training import Training
from thinwire.tools.links.lab import Lab
from thinwire.tools.units import parse_rate

MODEL = Model("gpt", 7.35e6, 32)
METHODS = ("dense", "attach auto", "thinwire.AdamW auto")
TURNS, STEPS, SLOW_TURNS, SLOW_STEPS = 30, 5, 6, 2
TIMEOUT = 300.0


class Keeper(LinkRank):
    """A rank that keeps its trainings, and turns from one to another."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._kept: dict[str, Training] = {}

    def prepare(self, name: str) -> str:
        """What was chosen."""
        self.start(name, MODEL)
        self.warm_up(5)
        self._kept[name] = self._training
        choice = None if self._training.sync is None else self._training.sync.choice
        return "" if choice is None else choice.reason

    def turn(self, name: str, steps: int) -> float:
        self._training = self._kept[name]
        return median(self.steps(steps + 1)[1:])


def main(rates: list[str]) -> None:
    for rate in rates or ["100mbit", "1gbit", "10gbit"]:
        with Lab(2, parse_rate(rate)) as lab, Workers(2, limit=TIMEOUT, links=lab.links) as workers:
            workers.form(2, Keeper)
            chosen = {name: workers.ask("prepare", name, limit=40 * TIMEOUT)[0] for name in METHODS}
            is_slow = workers.ask("turn", "dense", 1)[0] > 500
            turns, steps = (SLOW_TURNS, SLOW_STEPS) if is_slow else (TURNS, STEPS)
            times: dict[str, list[float]] = {name: [] for name in METHODS}
            for turn in range(turns):
                for name in METHODS[turn % len(METHODS) :] + METHODS[: turn % len(METHODS)]:
                    times[name].append(median(workers.ask("turn", name, steps)))
        for name in METHODS:
            ratio = median(mine / dense for mine, dense in zip(times[name], times["dense"], strict=True))
            print(
                f"{rate:>8}  {name:<20} {median(times[name]):9.1f} ms  {ratio:6.3f} x dense  {chosen[name]}", flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:])
