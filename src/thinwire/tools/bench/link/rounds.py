"""Measures each method at each rate and world size and yields one row for each.

A machine is sometimes slower for a few seconds. The methods at one rate are therefore measured in rounds, with a few
steps of each method in every round, so that compared times were taken close together. If steps are slow, there is one
round only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median

from thinwire.sync.policy import AUTO
from thinwire.testing.pool import RankError, Workers
from thinwire.tools.links.network import Network, network

from ..harness import Progress, Row
from ..methods import COMPRESSING, NO_COMMUNICATION, Method
from .rank import LinkRank
from .settings import Options
from .timeline import Timeline

_BEFORE = 3
"""Steps at the start of each round that are not timed, in which DDP rebuilds its buckets and warm-ups end."""
_COLD = 10
_TRIALS = 40
"""Number of steps that the time limit of the warm-up allows, in which "auto" tries compressors and chooses."""
_PER_ROUND, _SLOW_MS = 5, 1000.0
_LEAST, _PATIENCE_SECONDS = 5, 15.0
_TIMEOUT_SECONDS = 120.0
"""Seconds for an exchange, in addition to the time that the slowest link needs."""
_ROUND_TRIPS = 500


@dataclass
class Taken:
    """Samples of one method at one rate and world size, collected so far."""

    method: Method
    rate: str
    world: int
    left: int
    """Number of steps that are still to be timed."""
    samples: list[float] = field(default_factory=list)
    """Milliseconds of the steps of all ranks."""
    sent: int = 0
    """Bytes sent by all ranks."""
    steps: int = 0

    def row(self) -> Row:
        """Return the row with the results of all samples: the time over steps and ranks, and the bytes of a rank.

        The time is the median; with local steps, of which few exchange, it is the mean over whole rounds.
        """
        mean, is_local = fmean(self.samples), self.method.is_local
        return {
            "kind": "link",
            "rate": self.rate,
            "world": self.world,
            "method": self.method.text,
            "ms": mean if is_local else median(self.samples),
            "ms_mean": mean,
            "statistic": "mean" if is_local else "median",
            "bytes_per_step": self.sent / self.steps / self.world,
            "steps": self.steps,
        }


def measure(options: Options, progress: Progress, timelines: dict[str, Timeline] | None = None) -> Iterator[Row]:
    """Yield the rows of each world size, in each of them all rates, and at each rate all methods.

    timelines   gets the timeline of one more step of each method of thinwire, by its title. None: no such step.
    """
    first, limit = next(iter(options.speeds.values())), timeout(options)
    for world in options.worlds:
        with (
            network(world, *first, relay=options.relay) as net,
            Workers(world, limit=limit, links=net.links) as workers,
        ):
            workers.form(world, LinkRank)
            workers.ask("start", NO_COMMUNICATION, options.size, limit=limit)
            # Otherwise fresh memory and idle cores would slow the first method down.
            workers.ask("steps", _COLD, limit=_COLD * limit)
            for rate, speed in options.speeds.items():
                net.shape(*speed)
                yield from measure_methods(rate, world, options, net, workers, progress)
                for method in options.chosen:
                    if timelines is None or method.name not in COMPRESSING:
                        continue
                    workers.ask("start", method.text, options.size, limit=limit)
                    workers.ask("warm_up", _BEFORE, limit=_TRIALS * limit)
                    found = workers.ask("timeline", limit=limit)[0]
                    if found is not None:
                        timelines[f"{method.text}, {rate}, {world} ranks"] = found


def timeout(options: Options) -> float:
    """Return the time limit of an exchange in seconds.

    A dense all-reduce sends at most twice the gradient of 32 bits per parameter. The limit is four times that over the
    slowest link, plus `_TIMEOUT_SECONDS` and `_ROUND_TRIPS` times the longest round-trip time.
    """
    speeds = options.speeds.values()
    slowest, longest = min(speed.rate for speed in speeds), max(speed.round_trip for speed in speeds)
    return _TIMEOUT_SECONDS + 4 * 2 * 32 * options.parameters / slowest + _ROUND_TRIPS * longest


def measure_methods(
    rate: str, world: int, options: Options, net: Network, workers: Workers, progress: Progress
) -> Iterator[Row]:
    """Measure all methods at one rate, in rounds, and yield the rows in the order of the methods."""
    waiting = [Taken(method, rate, world, options.steps) for method in options.chosen]
    while waiting:
        for taken in [one for one in waiting if one.left]:
            progress.start(f"{world} ranks, {rate}, {taken.method.text}")
            try:
                take_steps(taken, options, net, workers)
            except RankError:
                yield from (one.row() for one in waiting if one.steps)
                raise
            if not taken.left:
                row = taken.row()
                progress.finish(f"{row['ms']:,.1f} ms, {row['bytes_per_step'] / 1e6:,.3f} MB")
            while waiting and not waiting[0].left:
                yield waiting.pop(0).row()


def take_steps(taken: Taken, options: Options, net: Network, workers: Workers) -> None:
    """Run one round of a method. Slow steps and "auto", which takes many steps to choose, get one round only.

    With local steps, the steps before and those that count are whole rounds of these. There are two rounds before:
    ranks connect in the first exchange, which with a delay ends in the second round.
    """
    method, limit = taken.method, timeout(options)  # of one step
    workers.ask("start", method.text, options.size, limit=limit)
    before = method.whole_rounds(max(_BEFORE, 2 * method.every))
    last: float = workers.ask("warm_up", before, limit=max(_TRIALS, before) * limit)[0]
    steps = method.whole_rounds(min(_PER_ROUND, taken.left))
    if last > _SLOW_MS or method.spec == AUTO:
        steps = method.whole_rounds(min(taken.left, max(_LEAST, int(1e3 * _PATIENCE_SECONDS / last))))
        taken.left = steps
    sent = sum(net.sent_bytes())
    times: list[list[float]] = workers.ask("steps", steps, limit=steps * limit)
    taken.sent += sum(net.sent_bytes()) - sent
    taken.samples += [sample for one in times for sample in one]
    taken.steps, taken.left = taken.steps + steps, max(0, taken.left - steps)
