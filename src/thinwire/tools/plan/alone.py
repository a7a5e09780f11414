"""Steps of a rank alone: what each way computes, by the steps of `thinwire bench link` with nobody to send to.

A rank is a world of one here, so nothing waits and nothing is sent; everything else is as it will be: DDP, its hooks,
the optimizer, and the codec, whose one payload is its own. All ranks of a host do this at the same time.
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
"""Turns of so many steps each, after one that does not count: DDP puts its buckets together anew, warm-ups end. Step 17
would be another one: thinwire.AdamW averages second moments after 16."""


Loss = Callable[[nn.Module], Tensor]
Subject = Callable[[], tuple[nn.Module, Loss]]
"""Makes a model, anew each time, and what its loss is."""


class Split(NamedTuple):
    """Seconds of a step."""

    forward: float
    backward: float
    optimizer: float


class Steps(NamedTuple):
    nothing: Split
    """Without communication."""
    more: dict[str, float]
    """Seconds that a step of each way takes more than that, by its name."""


@contextmanager
def alone(backend: str) -> Iterator[None]:
    """A world of one, in which whatever is called may exchange."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_steps(subject: Subject, names: Sequence[str], bench: Bench) -> Steps:
    """Of each way, by the name that `thinwire bench link` has for it: in turns with steps that exchange nothing, since
    a machine that others use is now quicker, now slower."""
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
    """Seconds for each entry, by the way's name, that its codec does not explain."""
    found = {}
    for name, seconds in steps.more.items():
        ours = codecs.get(name.partition(" ")[2])
        costs = ours or (halves if name in HALVES else Costs(0.0, 0.0, 0.0))
        more = seconds / entries - costs.encode - costs.commit - costs.write
        found[name] = more if ours else max(0.0, more)  # another optimizer may be quicker, nothing else can
    return found


def names_of(specs: Mapping[str, Compressor]) -> list[str]:
    """Those of the ways that a plan compares."""
    ours = [f"{'thinwire.AdamW' if given.sparse else 'attach'} {spec}" for spec, given in specs.items()]
    return [DENSE, *HALVES, *ours]


def _start(subject: Subject, name: str) -> tuple[Way, Loss]:
    torch.manual_seed(0)
    model, loss = subject()
    return way(name)(model), loss


def _burst(one: tuple[Way, Loss], bench: Bench) -> Split:
    """Of a few steps; the first finds memory as the other way has left it, and does not count."""
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
