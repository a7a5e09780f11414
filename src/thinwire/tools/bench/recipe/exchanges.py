"""How the gradients of a step become those of all ranks, and how many bytes that took.

Bytes of thinwire are counted by its synchronizer. Those of torch's own all-reduce are not to be had from torch, so they
are what a ring sends for what is all-reduced: 2 (P - 1) / P times its bytes, of which there are, for N parameters,

    dense       4 N
    fp16 hook   2 N
    PowerSGD    4 N in its first steps; then 4 (rows + columns) rank for each matrix that it compresses and 4 for each
                entry of the others, as its state counts them

torch's hooks need processes and DDP. Where ranks are threads, fp16 and PowerSGD are done here by the same rules, as one
tensor for the whole model in place of DDP's buckets. The sum of fp16 is that of `all_reduce_compressed`: it adds in
float32 and rounds to 16 bits at the end, where gloo and NCCL round at each addition, and what is not finite on any rank
(fp16 ends at 65,504) makes all elements NaN, where torch keeps Inf in the one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.collectives.local import LocalGroup
from thinwire.sync.buckets import Bucket

from .powersgd import PowerSGD

_ONE_BUCKET_MB = 1 << 14
"""With several buckets PowerSGD issues its collectives in an order that differs between ranks."""


@dataclass(frozen=True)
class Setup:
    """What a recipe starts from, on one rank."""

    model: nn.Module
    """On its device, with the same weights on every rank."""
    optimizer: Callable[..., torch.optim.Optimizer]
    lr: float
    options: dict[str, Any]
    """Of the recipe, as given; `compressor` and `algorithm` are for who exchanges, unless that is the optimizer."""
    warmup_steps: int
    size: int
    group: LocalGroup | None
    """This rank's, if ranks are threads; else it is the default group of torch.distributed."""
    bucket: Bucket | None = None
    """This rank's gradient, if ranks are threads."""

    def make(self, parameters: object, **more: object) -> torch.optim.Optimizer:
        """The optimizer; what the recipe was given comes before `more`."""
        return self.optimizer(parameters, **{"lr": self.lr, **more, **self.options})

    def ring(self, nbytes: float) -> float:
        return ring_bytes(nbytes, self.size)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


@dataclass(frozen=True)
class Exchange:
    """What the training loop needs."""

    module: nn.Module
    """To be called: the model, or DDP around it."""
    optimizer: torch.optim.Optimizer
    bytes_sent: Callable[[int], float]
    """By this rank in so many steps, which are all that were done."""
    after_backward: Callable[[], None] = lambda: None


def ring_bytes(nbytes: float, ranks: int) -> float:
    """What each rank sends when a ring all-reduces so many bytes."""
    return 2 * nbytes * (ranks - 1) / ranks


def dense(setup: Setup) -> Exchange:
    if setup.group is not None:
        return synchronized(setup, "none", [])
    step = setup.ring(4 * setup.parameters)
    return Exchange(DDP(setup.model), setup.make(setup.model.parameters()), lambda steps: steps * step)


def fp16(setup: Setup) -> Exchange:
    step = setup.ring(2 * setup.parameters)
    optimizer = setup.make(setup.model.parameters())
    if setup.group is not None:
        return Exchange(setup.model, optimizer, lambda steps: steps * step, lambda: _all_reduce_in_fp16(setup))
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    module = DDP(setup.model)
    module.register_comm_hook(None, fp16_compress_hook)
    return Exchange(module, optimizer, lambda steps: steps * step)


def _all_reduce_in_fp16(setup: Setup) -> None:
    """Replace gradients by their mean; as `fp16_compress_hook` each rank divides before the sum."""
    gradients = [one.grad for one in setup.model.parameters() if one.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients]).half().div_(setup.size)
    thinwire.all_reduce_compressed(flat, "none", group=setup.group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(to) for part, to in zip(parts, gradients, strict=True)])


def powersgd(setup: Setup, rank: int) -> Exchange:
    dense_steps = max(2, setup.warmup_steps)  # fewer are an error in torch's hook
    optimizer = setup.make(setup.model.parameters())
    if setup.group is not None:
        group = setup.group

        def mean(flat: Tensor) -> None:
            thinwire.all_reduce_compressed(flat, "none", op=dist.ReduceOp.AVG, group=group)

        method = PowerSGD(setup.model.parameters(), mean, rank=rank, dense_steps=dense_steps)
        return Exchange(
            setup.model, optimizer, lambda steps: setup.ring(4 * method.numel_sent), method.all_reduce_gradients
        )
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=dense_steps, random_seed=0)
    module, whole = DDP(setup.model, bucket_cap_mb=_ONE_BUCKET_MB), setup.parameters
    module.register_comm_hook(state, powerSGD_hook)

    def bytes_sent(steps: int) -> float:
        left_out = state.total_numel_before_compression - state.total_numel_after_compression
        return setup.ring(4 * (steps * whole - left_out))

    return Exchange(module, optimizer, bytes_sent)


def synchronized(setup: Setup, compressor: str, warmup: Sequence[tuple[int, str]]) -> Exchange:
    """Gradients are compressed; the optimizer is torch's."""
    options = dict(setup.options)
    policy = thinwire.Policy(options.pop("compressor", compressor), warmup=warmup)
    given = {"algorithm": options.pop("algorithm", "auto")}
    optimizer = setup.optimizer(setup.model.parameters(), **{"lr": setup.lr, **options})
    if setup.group is None:
        module = DDP(setup.model)
        sync = thinwire.attach(module, policy, **given)
        return Exchange(module, optimizer, lambda steps: float(sync.stats.bytes_sent))
    sync = thinwire.Synchronizer(policy, group=setup.group, **given)
    return Exchange(setup.model, optimizer, lambda steps: float(sync.stats.bytes_sent), _reduced_by(sync, setup.bucket))


def in_optimizer(setup: Setup) -> Exchange:
    """thinwire's optimizer, which exchanges its updates."""
    module = DDP(setup.model) if setup.group is None else setup.model
    more = {} if setup.group is None else {"group": setup.group}
    optimizer: Any = setup.make(module, warmup_steps=setup.warmup_steps, **more)
    exchange = Exchange(module, optimizer, lambda steps: float(optimizer.sync.stats.bytes_sent))
    if setup.bucket is not None:
        exchange = replace(exchange, after_backward=_sent_by(optimizer, setup.bucket))
    return exchange


def _reduced_by(sync: thinwire.Synchronizer, bucket: Bucket | None) -> Callable[[], None]:
    """Return what hands a rank's whole gradient to its synchronizer, as DDP's hook does."""
    assert bucket is not None

    def reduce() -> None:
        sync.add_bucket(bucket, first=True, last=True)
        sync.finish()

    return reduce


def _sent_by(optimizer: Any, bucket: Bucket) -> Callable[[], None]:
    """Return what hands a rank's whole gradient to its optimizer."""

    def send() -> None:
        optimizer.add_bucket(bucket, first=True, last=True)
        optimizer.watch_gradients()

    return send
