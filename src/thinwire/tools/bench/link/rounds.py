"""Measures each method at each rate and world size and yields one row for each.

A machine is sometimes slower for a few seconds. The methods at one rate are therefore measured in rounds, with a few
steps of each method in every round, so that compared times were taken close together. If steps are slow, there is one
round only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median

from thinwire.sync.policy import AUTO
from thinwire.tools.links.network import Network, network
from thinwire.tools.workers import WorkerError, Workers

from ..harness import Progress, Row
from ..methods import NO_COMMUNICATION, Method
from .rank import LinkRank
from .settings import Settings
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
    """Samples of one method at one rate, collected so far."""

    left: int
    """Number of steps that are still to be timed."""
    samples: list[float] = field(default_factory=list)
    """Milliseconds of the steps of all ranks."""
    sent: int = 0
    """Bytes sent by all ranks."""
    steps: int = 0

    def row(self, rate: str, world: int, method: Method) -> Row:
        """Return the row with the results of all samples: the time over steps and ranks, and the bytes of a rank.

        The time is the median; with local steps, of which few exchange, it is the mean over whole rounds.
        """
        mean = fmean(self.samples)
        return {
            "kind": "link",
            "rate": rate,
            "world": world,
            "method": method.text,
            "ms": mean if method.is_local else median(self.samples),
            "ms_mean": mean,
            "statistic": "mean" if method.is_local else "median",
            "bytes_per_step": self.sent / self.steps / world,
            "steps": self.steps,
        }


def measure(settings: Settings, progress: Progress, timelines: dict[str, Timeline] | None = None) -> Iterator[Row]:
    """Yield the rows of each world size, in each of them all rates, and at each rate all methods.

    timelines   gets the timeline of one more step of each method of thinwire, by its title. None: no such step.
    """
    first, limit = next(iter(settings.rates.values())), timeout(settings)
    for world in settings.worlds:
        with (
            network(world, *first, relay=settings.relay) as net,
            Workers(world, limit=limit, links=net.links) as workers,
        ):
            workers.form(world, LinkRank)
            workers.ask("start", NO_COMMUNICATION, settings.model, limit=limit)
            # Otherwise fresh memory and idle cores would slow the first method down.
            workers.ask("steps", _COLD, limit=_COLD * limit)
            for name, speed in settings.rates.items():
                net.shape(*speed)
                yield from measure_methods(
                    name, world=world, settings=settings, net=net, workers=workers, progress=progress
                )
                for method in settings.methods if timelines is not None else ():
                    if method.is_local or not method.is_ours:  # few local steps exchange; others record nothing
                        continue
                    workers.ask("start", method.text, settings.model, limit=limit)
                    workers.ask("warm_up", _BEFORE, limit=_TRIALS * limit)
                    found = workers.ask("timeline", limit=limit)[0]
                    if found is not None and timelines is not None:
                        timelines[f"{method.text}, {name}, {world} ranks"] = found


def timeout(settings: Settings) -> float:
    """Return the time limit of an exchange in seconds.

    A dense all-reduce sends at most twice the gradient of 32 bits per parameter. The limit is four times that over the
    slowest link, plus `_TIMEOUT_SECONDS` and `_ROUND_TRIPS` times the longest round-trip time.
    """
    slowest = min(speed.rate for speed in settings.rates.values())
    longest = max(speed.round_trip for speed in settings.rates.values())
    return _TIMEOUT_SECONDS + 4 * 2 * 32 * settings.model.parameters / slowest + _ROUND_TRIPS * longest


def measure_methods(
    rate: str, world: int, settings: Settings, net: Network, workers: Workers, progress: Progress
) -> Iterator[Row]:
    """Measure all methods at one rate, in rounds, and yield the rows in the order of the methods."""
    taken = {method.text: Taken(settings.steps) for method in settings.methods}
    waiting = list(settings.methods)
    while left := [method for method in settings.methods if taken[method.text].left]:
        for method in left:
            progress.start(f"{world} ranks, {rate}, {method.text}")
            try:
                take_steps(method, taken=taken[method.text], settings=settings, net=net, workers=workers)
            except WorkerError:
                yield from (taken[one.text].row(rate, world, one) for one in waiting if taken[one.text].steps)
                raise
            if not taken[method.text].left:
                row = taken[method.text].row(rate, world, method)
                progress.finish(f"{row['ms']:,.1f} ms, {row['bytes_per_step'] / 1e6:,.3f} MB")
            while waiting and not taken[waiting[0].text].left:
                done = waiting.pop(0)
                yield taken[done.text].row(rate, world, done)


def take_steps(method: Method, taken: Taken, settings: Settings, net: Network, workers: Workers) -> None:
    """Run one round of a method. Slow steps and "auto", which takes many steps to choose, get one round only.

    With local steps, the steps before and those that count are whole rounds of these. There are two rounds before:
    ranks connect in the first exchange, which with a delay ends in the second round.
    """
    limit = timeout(settings)  # of one step
    workers.ask("start", method.text, settings.model, limit=limit)
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
