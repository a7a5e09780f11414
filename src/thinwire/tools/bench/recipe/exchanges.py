"""Exchanges the gradients of a step between ranks and counts the bytes sent.

thinwire's synchronizer counts its own bytes. torch does not report the bytes of its all-reduce, so they are those of a
ring: 2 (P - 1) / P times the bytes that are all-reduced. For N parameters these are

    dense       4 N
    fp16 hook   2 N
    PowerSGD    4 N in its first steps; then 4 (rows + columns) rank for each compressed matrix and 4 for each element
                of the other tensors, as counted by the state of the hook

torch's hooks need processes and DDP. If ranks are threads, this module implements fp16 and PowerSGD by the same rules,
with one tensor for the whole model in place of DDP's buckets. The fp16 sum is that of `all_reduce_compressed`. It adds
in float32 and rounds to 16 bits at the end, whereas gloo and NCCL round at each addition. If any rank has a value that
is not finite (fp16 ends at 65,504), all elements become NaN, whereas torch keeps Inf in that element only.
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
"""Bucket size for PowerSGD, large enough for one bucket.

With several buckets, the order of its collectives differs between ranks.
"""


@dataclass(frozen=True)
class Setup:
    """The arguments from which a recipe builds its exchange, on one rank."""

    model: nn.Module
    """The model on its device, with the same weights on every rank."""
    optimizer: Callable[..., torch.optim.Optimizer]
    lr: float
    options: dict[str, Any]
    """Options of the recipe as given.

    `compressor` and `algorithm` go to the synchronizer, or to the optimizer if it does the exchange.
    """
    warmup_steps: int
    size: int
    group: LocalGroup | None
    """Process group of this rank if ranks are threads. None stands for the default group of torch.distributed."""
    bucket: Bucket | None = None
    """Gradient of this rank if ranks are threads."""

    def make(self, parameters: object, **more: object) -> torch.optim.Optimizer:
        """Build the optimizer. The options of the recipe override `more`."""
        return self.optimizer(parameters, **{"lr": self.lr, **more, **self.options})

    def ring(self, nbytes: float) -> float:
        """Return the bytes that each rank sends in a ring all-reduce of `nbytes` bytes."""
        return ring_bytes(nbytes, self.size)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())


@dataclass(frozen=True)
class Exchange:
    """The objects that the training loop uses."""

    module: nn.Module
    """The module to call: the model, or DDP around it."""
    optimizer: torch.optim.Optimizer
    bytes_sent: Callable[[int], float]
    """Returns the bytes that this rank has sent. The argument is the number of steps done so far."""
    after_backward: Callable[[], None] = lambda: None


def ring_bytes(nbytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of `nbytes` bytes."""
    return 2 * nbytes * (ranks - 1) / ranks


def dense(setup: Setup) -> Exchange:
    """Build an exchange that averages gradients without compression."""
    if setup.group is not None:
        return synchronized(setup, "none", [])
    step = setup.ring(4 * setup.parameters)
    return Exchange(DDP(setup.model), setup.make(setup.model.parameters()), lambda steps: steps * step)


def fp16(setup: Setup) -> Exchange:
    """Build an exchange that averages gradients in fp16, by torch's hook if ranks are processes."""
    step = setup.ring(2 * setup.parameters)
    optimizer = setup.make(setup.model.parameters())
    if setup.group is not None:
        return Exchange(setup.model, optimizer, lambda steps: steps * step, lambda: _all_reduce_in_fp16(setup))
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    module = DDP(setup.model)
    module.register_comm_hook(None, fp16_compress_hook)
    return Exchange(module, optimizer, lambda steps: steps * step)


def _all_reduce_in_fp16(setup: Setup) -> None:
    """Replace gradients by their mean. Each rank divides before the sum, as in `fp16_compress_hook`."""
    gradients = [one.grad for one in setup.model.parameters() if one.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients]).half().div_(setup.size)
    thinwire.all_reduce_compressed(flat, "none", group=setup.group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(to) for part, to in zip(parts, gradients, strict=True)])


def powersgd(setup: Setup, rank: int) -> Exchange:
    """Build an exchange that averages gradients by PowerSGD, by torch's hook if ranks are processes."""
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
    """Build an exchange in which thinwire compresses the gradients and torch's optimizer steps."""
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
    """Build an exchange with thinwire's optimizer, which exchanges compressed updates."""
    module = DDP(setup.model) if setup.group is None else setup.model
    more = {} if setup.group is None else {"group": setup.group}
    optimizer: Any = setup.make(module, warmup_steps=setup.warmup_steps, **more)
    exchange = Exchange(module, optimizer, lambda steps: float(optimizer.sync.stats.bytes_sent))
    if setup.bucket is not None:
        exchange = replace(exchange, after_backward=_sent_by(optimizer, setup.bucket))
    return exchange


def _reduced_by(sync: thinwire.Synchronizer, bucket: Bucket | None) -> Callable[[], None]:
    """Return a function that passes the whole gradient of a rank to its synchronizer, as DDP's hook does."""
    assert bucket is not None

    def reduce() -> None:
        sync.add_bucket(bucket, first=True, last=True)
        sync.finish()

    return reduce


def _sent_by(optimizer: Any, bucket: Bucket) -> Callable[[], None]:
    """Return a function that passes the whole gradient of a rank to its optimizer."""

    def send() -> None:
        optimizer.add_bucket(bucket, first=True, last=True)
        optimizer.watch_gradients()

    return send
