"""Time the steps of each way on a single rank: the steps of `thinwire bench link` with world size 1.

With world size 1 nothing is sent, and no rank waits. The rest is the same as in training: DDP, its hooks, the optimizer
and the codec, which decodes only the rank's own payload. All ranks of a node run these steps at the same time.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.compressors import Compressor
from thinwire.tools.bench.link.ways import Way, way

from .costs import Costs
from .measure import Bench
from .ways import DENSE, HALVES

NOTHING = "no communication"
_TURNS, _STEPS = 3, 4
"""Number of turns that count, and of steps in each turn. The turn before them does not count, because DDP rebuilds its
buckets in it, and warm-ups end. All turns together have 16 steps: step 17 would differ, because thinwire.AdamW averages
second moments after step 16."""


Loss = Callable[[nn.Module], Tensor]
Subject = Callable[[], tuple[nn.Module, Loss]]
"""Function that returns a new model and its loss function at each call."""


class Split(NamedTuple):
    """Seconds of the three parts of a step."""

    forward: float
    backward: float
    optimizer: float


class Steps(NamedTuple):
    """Step times of a single rank."""

    nothing: Split
    """Seconds of a step without communication."""
    more: dict[str, float]
    """Additional seconds of a step of each way, by the name of the way."""


@contextmanager
def alone(backend: str) -> Iterator[None]:
    """Set up a process group of this rank alone for the duration of the block, so that collectives can be called."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_steps(subject: Subject, names: Sequence[str], bench: Bench) -> Steps:
    """Time the steps of each way, given by its name in `thinwire bench link`.

    Steps of a way alternate with steps without communication, because the speed of a shared machine changes over time.
    """
    nothings, more = [], {}
    for name in names:
        nothing, mine = (_start(subject, each) for each in (NOTHING, name))
        differences = []
        for turn in range(1 + _TURNS):
            both = _burst(nothing, bench), _burst(mine, bench)
            if turn:
                nothings.append(both[0])
                differences.append(sum(both[1]) - sum(both[0]))
        more[name] = median(differences)
        del nothing, mine
        gc.collect()  # models and their hooks refer to each other
    return Steps(_middle(nothings), more)


def extras(steps: Steps, codecs: Mapping[str, Costs], halves: Costs, entries: int) -> dict[str, float]:
    """Return the additional seconds per element that the codec does not explain, by the name of the way."""
    found = {}
    for name, seconds in steps.more.items():
        ours = codecs.get(name.partition(" ")[2])
        costs = ours or (halves if name in HALVES else Costs(0.0, 0.0, 0.0))
        more = seconds / entries - costs.encode - costs.commit - costs.write
        found[name] = more if ours else max(0.0, more)  # only another optimizer can make a step faster
    return found


def names_of(specs: Mapping[str, Compressor]) -> list[str]:
    """Return the names of the ways that a plan compares."""
    ours = [f"{'thinwire.AdamW' if given.sparse else 'attach'} {spec}" for spec, given in specs.items()]
    return [DENSE, *HALVES, *ours]


def _start(subject: Subject, name: str) -> tuple[Way, Loss]:
    torch.manual_seed(0)
    model, loss = subject()
    return way(name)(model), loss


def _burst(one: tuple[Way, Loss], bench: Bench) -> Split:
    """Return the median times of a few steps.

    The first step does not count, because the other way ran before it and changed the state of memory and caches.
    """
    return _middle([_step(*one, bench) for _ in range(_STEPS)][1:])


def _middle(splits: Sequence[Split]) -> Split:
    return Split(*(median(one[part] for one in splits) for part in range(3)))


def _step(made: Way, loss: Loss, bench: Bench) -> Split:
    made.optimizer.zero_grad()
    at = [bench.now()]
    found = loss(made.module)
    at.append(bench.now())
    found.backward()
    at.append(bench.now())
    made.optimizer.step()
    at.append(bench.now())
    return Split(at[1] - at[0], at[2] - at[1], at[3] - at[2])
