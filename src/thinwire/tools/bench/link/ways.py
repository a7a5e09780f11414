"""The ways to train that are compared: torch's DDP, its communication hooks, the powersgd package, and thinwire.

Each is built from a model that is the same on every rank. All but thinwire.SGD step with AdamW. torch's 8-bit and bf16
hooks do not run on gloo. bf16 is therefore implemented here as in torch's hook: cast, all-reduce, cast back.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.sync.policy import AUTO, DEFAULT

from .settings import MODES, PEERS, POWERSGD_PACKAGE

_ONE_BUCKET_MB = 1 << 14
"""Bucket size for PowerSGD, large enough for one bucket.

With several buckets, torch's PowerSGD issues its collectives in an order that differs between ranks, and gloo aborts.
"""
_WARMUP_STEPS = 2
"""Warm-up steps of the ways that have a warm-up. Timed steps come after it."""


class Way(NamedTuple):
    """The objects that a training step uses."""

    module: nn.Module
    optimizer: Any
    sync: thinwire.Synchronizer | None = None
    """The synchronizer of a way of thinwire, otherwise None."""


Maker = Callable[[nn.Module], Way]


def way(name: str) -> Maker:
    """Return the function that builds the way of this name. Raises ValueError for an unknown name."""
    if name in _PEERS:
        return _PEERS[name]
    mode, _, spec = name.partition(" ")
    if mode not in MODES:
        raise ValueError(f"way {name!r}, expected one of {', '.join(PEERS)}, or one of {', '.join(MODES)} with a spec")
    if spec not in (AUTO, DEFAULT):
        thinwire.compressor(spec)
    return partial(_attached if mode == "attach" else partial(_stepping, mode.removeprefix("thinwire.")), spec)


def nothing(model: nn.Module) -> Way:
    """Build DDP without communication, as the upper bound on speed."""
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    return _hooked(model, None, noop_hook)


def dense(model: nn.Module) -> Way:
    """Build plain DDP with torch's AdamW."""
    return Way(_ddp(model), _adamw(model))


def fp16(model: nn.Module) -> Way:
    """Build DDP with torch's fp16 hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return _hooked(model, None, fp16_compress_hook)


def bf16(model: nn.Module) -> Way:
    """Build DDP with an all-reduce in bf16."""
    return _hooked(model, None, _bf16_hook)


def powersgd(rank: int) -> Maker:
    """Return a function that builds DDP with torch's PowerSGD hook."""

    def make(model: nn.Module) -> Way:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=_WARMUP_STEPS, random_seed=0)
        return _hooked(model, state, powerSGD_hook, bucket_cap_mb=_ONE_BUCKET_MB)

    return make


def powersgd_package(model: nn.Module) -> Way:
    """Build a way with the package of PowerSGD's authors, without DDP.

    It exchanges after the backward pass. It keeps what it has not sent in the gradients, so these are not cleared.
    """
    package: Any = importlib.import_module("powersgd")
    config = package.Config(rank=1, min_compression_rate=10, num_iters_per_step=2, start_compressing_after_num_steps=0)
    aggregator = package.PowerSGD(list(model.parameters()), config=config)
    optimizer = _adamw(model)

    class Stepping:
        def zero_grad(self) -> None:
            pass

        def step(self) -> None:
            package.optimizer_step(optimizer, aggregator)

    return Way(model, Stepping())


def _attached(spec: str, model: nn.Module) -> Way:
    """Build DDP with gradients compressed by thinwire, and torch's AdamW."""
    module = _ddp(model)
    sync = thinwire.attach(module, spec)
    return Way(module, _adamw(model), sync)


def _stepping(optimizer: str, spec: str, model: nn.Module) -> Way:
    """Build DDP and thinwire's optimizer, which compresses its updates."""
    module = _ddp(model)
    made = getattr(thinwire, optimizer)(module, lr=1e-5, compressor=spec, warmup_steps=_WARMUP_STEPS)
    return Way(module, made, made.sync)


_PEERS: dict[str, Maker] = {
    "no communication": nothing,
    "dense": dense,
    "fp16 hook": fp16,
    "bf16": bf16,
    "powersgd rank 1": powersgd(1),
    "powersgd rank 4": powersgd(4),
    POWERSGD_PACKAGE: powersgd_package,
}
assert tuple(_PEERS) == PEERS


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


def _ddp(model: nn.Module, **options: Any) -> DDP:
    """Wrap the model in DDP without broadcasting the weights.

    The broadcast would take longer than the steps, and all ranks have the same weights.
    """
    return DDP(model, init_sync=False, **options)


def _hooked(model: nn.Module, state: object, hook: Callable[..., Any], **options: Any) -> Way:
    module = _ddp(model, **options)
    module.register_comm_hook(state, hook)
    return Way(module, _adamw(model))


def _bf16_hook(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    small = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)

    def widen(done: Any) -> Tensor:
        whole: Tensor = bucket.buffer()
        return whole.copy_(done.value()[0])

    assert work is not None
    widened: torch.futures.Future[Tensor] = work.get_future().then(widen)
    return widened
