"""Takes steps by each method at each rate and world size, and yields one row for each.

A machine is sometimes slower for a few seconds. The methods at one rate are therefore measured in rounds, with a few
steps of each; if steps are slow, in one round only.
"""

import gc
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.sync.policy import AUTO
from thinwire.testing.pool import RankError, Workers
from thinwire.tools.links.relay import Relay

from .harness import Progress, Row
from .link import Options
from .methods import NO_COMMUNICATION, Method, parse
from .namespaces import Network, network
from .training import Setup, Training, build, take_step

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


class LinkRank:
    """A rank behind a link that takes steps by one method after the other."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        # The time is measured here, and not the loss.
        warnings.filterwarnings("ignore", ".*AdamW on gradients compressed by")

    def start(self, name: str, kind: str, parameters: float, batch_size: int) -> None:
        """Build a model of a kind and size, and start to train it by the method of this name."""
        vars(self).pop("_training", None)  # frees its memory
        gc.collect()
        torch.manual_seed(0)
        # All ranks have the same weights. Sending them would take longer than the steps.
        method, (model, shape) = parse(name), build_model(kind, parameters)
        self._every = method.every
        self._training: Training = build(method, Setup(model, lr=1e-5, ddp={"init_sync": False}))
        torch.manual_seed(1 + self._rank)
        self._batch = torch.randn(batch_size, *shape)

    def warm_up(self, count: int) -> float:
        """Take `count` steps, then more until "auto" has chosen, and return the milliseconds of the last step.

        "auto" chooses at the same step on all ranks. With local steps it is the mean over the last round.
        """
        sync, taken = self._training.sync, self.steps(count)
        while sync is not None and sync.policy.auto and sync.choice is None:
            taken = self.steps(1)
        return fmean(taken[-self._every :])

    def steps(self, count: int) -> list[float]:
        return [take_step(self._training, self._loss) for _ in range(count)]

    def _loss(self, module: nn.Module) -> Tensor:
        return F.mse_loss(module(self._batch), torch.zeros(()).expand_as(self._batch))


def build_model(kind: str, parameters: float) -> tuple[nn.Module, tuple[int, ...]]:
    """Build a model of about so many parameters, and return it with the shape of a sample.

    kind   gpt: the linear layers of 6 GPT blocks; cnn: 8 convolutions on 16 x 16 images.

    The bytes sent depend on the number of parameters and on little else. Widths are multiples of 8.
    """
    width = max(8, 8 * round(math.sqrt(parameters / (6 * 12 if kind == "gpt" else 8 * 9)) / 8))
    if kind == "gpt":
        return nn.Sequential(*(Block(width) for _ in range(6))), (width,)
    layers = (nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(8))
    return nn.Sequential(*layers), (width, 16, 16)


class Block(nn.Module):
    """The four linear layers of a GPT block, with an elementwise gate in place of attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.project(value * torch.sigmoid(query * key))
        thought: Tensor = self.contract(nn.functional.gelu(self.expand(self.norm2(x))))
        return x + thought


@dataclass
class Taken:
    """Samples of one method at one rate and world size, collected so far: of all ranks together."""

    method: Method
    rate: str
    world: int
    left: int
    """Number of steps that are still to be timed."""
    samples: list[float] = field(default_factory=list)
    sent: int = 0
    steps: int = 0

    def row(self) -> Row:
        """Return the row. Its time is the median; with local steps, of which few exchange, that of whole rounds."""
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


def measure(options: Options, progress: Progress) -> Iterator[Row]:
    first, limit = next(iter(options.speeds.values())), timeout(options)
    for world in options.worlds:
        with (
            network(world, *first, relay=options.relay) as net,
            Workers(world, limit=limit, links=net.links) as workers,
        ):
            workers.form(world, LinkRank)
            workers.ask("start", NO_COMMUNICATION, *_size(options), limit=limit)
            # Otherwise fresh memory and idle cores would slow the first method down.
            workers.ask("steps", _COLD, limit=_COLD * limit)
            for rate, speed in options.speeds.items():
                net.shape(*speed) if isinstance(net, Relay) else net.shape(speed.rate)
                yield from measure_methods(rate, world, options, net, workers, progress)


def timeout(options: Options) -> float:
    """Return the time limit of an exchange: four times a dense all-reduce over the slowest link, and more."""
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
            try:
                take_steps(taken, options, net, workers)
            except RankError:
                yield from (one.row() for one in waiting if one.steps)
                raise
            if not taken.left:
                row, title = taken.row(), f"{world} ranks, {rate}, {taken.method.text}"
                progress.finish(title, f"{row['ms']:,.1f} ms, {row['bytes_per_step'] / 1e6:,.3f} MB")
            while waiting and not waiting[0].left:
                yield waiting.pop(0).row()


def take_steps(taken: Taken, options: Options, net: Network, workers: Workers) -> None:
    """Run one round of a method. Slow steps and "auto", which takes many steps to choose, get one round only.

    With local steps, the steps before and those that count are whole rounds of these. There are two rounds before:
    ranks connect in the first exchange, which with a delay ends in the second round.
    """
    method, limit = taken.method, timeout(options)  # of one step
    workers.ask("start", method.text, *_size(options), limit=limit)
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


def _size(options: Options) -> tuple[str, float, int]:
    return options.model, options.parameters, options.batch
