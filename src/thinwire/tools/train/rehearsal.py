"""Some steps before the clock starts, so that no step of the training waits for a kernel to be compiled.

Two ranks that are threads train one small layer with the optimizer and the compressor of the run. A kernel is compiled
once on a machine, by the first rank of the node, and kept on disk, from where the others load it.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import thinwire
from thinwire.collectives import LocalGroup, LocalWorld

from .checks import local_compressor, sends_updates
from .config import Config
from .control import Control
from .place import Place

_STEPS = 4
"""Among them one of the warm-up and a refresh of the second moment."""


def compile_kernels(config: Config, place: Place, control: Control, device: torch.device) -> float:
    """Compile or load the kernels that a run needs. All ranks call this. Return the seconds that it took."""
    started = time.perf_counter()
    for leads in (True, False):
        if (place.local_rank == 0) == leads:
            LocalWorld(2, turns=True).run(_rehearse, config, device)
        control.gather(None)
    return time.perf_counter() - started


def _rehearse(group: LocalGroup, config: Config, device: torch.device) -> None:
    # Draws no random number, since a run with the same seed must draw the same ones.
    model = nn.utils.skip_init(nn.Linear, 64, 256, device=device)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    exchange: Callable[[], object]
    if config.local_steps:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = thinwire.LocalSteps(inner, every=1, compressor=local_compressor(config), group=group).step
    elif not sends_updates(config.compressor):
        exchange = partial(thinwire.Synchronizer(config.compressor, group=group).all_reduce_gradients, model)
    elif config.optimizer == "adamw":
        exchange = thinwire.AdamW(
            model, compressor=config.compressor, warmup_steps=1, refresh_every=2, group=group
        ).step
    else:
        exchange = thinwire.SGD(
            model, lr=0.1, momentum=0.9, compressor=config.compressor, warmup_steps=1, group=group
        ).step
    for step in range(_STEPS):
        model.zero_grad()
        given = torch.arange(64.0, device=device) + step + group.rank
        model(given).square().mean().backward()
        exchange()
