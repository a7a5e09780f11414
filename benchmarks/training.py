"""Builds what a training loop needs for a method: the module to call, the optimizer, and a count of the bytes sent.

thinwire's synchronizer counts its own bytes. torch does not report the bytes of its all-reduce, so they are those of a
ring: 2 (P - 1) / P times the bytes that are all-reduced. For N parameters these are

    dense            4 N
    fp16 hook, bf16  2 N
    PowerSGD         4 N in its first steps; then 4 (rows + columns) rank for each compressed matrix and 4 for each
                     element of the other tensors, as counted by the state of the hook

torch's hooks need processes and DDP. Ranks that are threads train by dense and by thinwire's methods.
"""

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import thinwire
from thinwire.collectives import cost
from thinwire.collectives.local import LocalGroup
from thinwire.sync.buckets import Bucket
from thinwire.sync.policy import AUTO, DEFAULT

from .methods import EIGHT_BITS, NO_COMMUNICATION, Method, parse

_ONE_BUCKET_MB = 1 << 14
"""Bucket size for PowerSGD, large enough for one bucket.

With several buckets, torch's PowerSGD issues its collectives in an order that differs between ranks, and gloo aborts.
"""
MOMENTUM = 0.9
"""Momentum of SGD, torch's and thinwire's."""
OPTIONS = ("outer_lr", "outer_momentum", "nesterov", "decay", "fragments", "delay")
"""Options of LocalSteps that a method may have. All others are those of the optimizer inside."""


class Several:
    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@dataclass(frozen=True)
class Training:
    """The objects that a training loop uses."""

    module: nn.Module
    """The module to call: the model, or DDP around it."""
    optimizer: Any
    sync: thinwire.Synchronizer | None = None
    torch_bytes: Callable[[int], float] = lambda steps: 0.0
    """Returns the bytes that a rank sends in so many steps, if there is no synchronizer, which counts them."""
    after_backward: Callable[[], None] = lambda: None
    before_evaluation: Callable[[], None] = lambda: None
    """Makes the weights of all ranks the same, if they are not. All ranks call it."""

    def bytes_sent(self, steps: int) -> float:
        return self.torch_bytes(steps) if self.sync is None else float(self.sync.stats.bytes_sent)


def take_step(training: Training, loss: Callable[[nn.Module], Tensor]) -> float:
    """Take a training step between processes, and return its milliseconds."""
    begin = time.perf_counter()
    training.optimizer.zero_grad()
    loss(training.module).backward()
    training.optimizer.step()
    return 1e3 * (time.perf_counter() - begin)


@dataclass(frozen=True)
class Setup:
    """What a method is built from, on one rank."""

    model: nn.Module
    """The model on its device, with the same weights on every rank."""
    lr: float
    warmup_steps: int = 2
    ddp: dict[str, Any] = field(default_factory=dict)
    """Options of DDP."""
    group: LocalGroup | None = None
    """Process group of this rank if ranks are threads. None stands for the default group of torch.distributed."""
    bucket: Bucket | None = None
    """Gradient of this rank if ranks are threads."""

    def ring(self, nbytes: float) -> float:
        return cost.ring(int(nbytes), dist.get_world_size() if self.group is None else self.group.size)

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def check(text: str) -> Method:
    """Return the method that a text stands for. Raises ValueError for an unknown name, option or compressor."""
    method = parse(text)
    known = set(inspect.signature(_optimizer(method)).parameters) - {"params", "group", "self"}
    known |= set(OPTIONS) if method.is_local else {"compressor", "algorithm"} if method.is_ours else set()
    for key in method.options:
        if key not in known:
            raise ValueError(
                f"option {key!r} of method {text.partition(';')[0]!r}, expected one of: {', '.join(sorted(known))}"
            )
    if method.is_ours and method.spec not in (AUTO, DEFAULT):
        thinwire.compressor(method.spec)
    return method


# DDP refuses hooks with other annotations.
def _send_nothing(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Send nothing: what is left is DDP itself, which copies gradients into buckets and calls Python for each."""
    buffer = bucket.buffer()
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


def _bf16_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Send bfloat16 by torch's own hook, which DDP refuses by its name where there is no NCCL."""
    return bf16_compress_hook(None, bucket)  # type: ignore[arg-type]


_HOOKS = {NO_COMMUNICATION: _send_nothing, "fp16 hook": fp16_compress_hook, "bf16": _bf16_hook}


def build(method: Method, setup: Setup) -> Training:
    if method.in_optimizer:
        return _with_our_optimizer(method, setup)
    name, optimizer = method.name, _make(method, setup, setup.model.parameters())
    if method.is_local:
        return _local(method, setup, optimizer)
    if name == "attach" or (name == "dense" and setup.group is not None):
        return _attached(method, setup, optimizer)
    if name.startswith("powersgd rank "):
        return _powersgd(method, setup, optimizer)
    nbytes = setup.ring({NO_COMMUNICATION: 0, "dense": 4}.get(name, 2) * setup.numel)
    module = DDP(setup.model, **setup.ddp)
    if name in _HOOKS:
        module.register_comm_hook(None, _HOOKS[name])
    return Training(module, optimizer, torch_bytes=lambda steps: steps * nbytes)


def _optimizer(method: Method) -> Callable[..., Any]:
    if method.in_optimizer:
        ours: Callable[..., Any] = getattr(thinwire, method.name.removeprefix("thinwire."))
        return ours
    return {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "muon": torch.optim.Muon}[method.family]


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the hidden matrices of a model, which Muon is for, and all other parameters.

    Embeddings are not hidden, nor is a linear layer that is the last child of the model: its head. Raises ValueError if
    there is no hidden matrix.
    """
    outer: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outer += [child for child in list(model.children())[-1:] if isinstance(child, nn.Linear)]
    apart = {id(parameter) for module in outer for parameter in module.parameters()}
    hidden = [one for one in model.parameters() if one.ndim == 2 and id(one) not in apart]
    if not hidden:
        raise ValueError(f"{type(model).__name__} has no hidden matrix, which Muon is for: use adamw")
    taken = {id(one) for one in hidden}
    return hidden, [one for one in model.parameters() if id(one) not in taken]


def _make(method: Method, setup: Setup, target: object, **more: object) -> Any:
    """Build the optimizer of a method. Muon gets the hidden matrices of the model, and AdamW the rest."""
    momentum = {"momentum": MOMENTUM} if method.family == "sgd" else {}
    apart = OPTIONS if method.is_local else ("algorithm",)
    options: dict[str, Any] = {key: value for key, value in method.options.items() if key not in apart}
    if method.family == "muon":
        matrices, others = split_for_muon(setup.model)
        muon = torch.optim.Muon(matrices, **{"lr": setup.lr, "adjust_lr_fn": "match_rms_adamw", **options})
        return Several([muon, torch.optim.AdamW(others, lr=muon.param_groups[0]["lr"])])
    return _optimizer(method)(target, **{"lr": setup.lr, **momentum, **more, **options})


def _collective(method: Method) -> thinwire.Collective:
    return thinwire.Collective(algorithm=str(method.options.get("algorithm", "auto")))


def _with_our_optimizer(method: Method, setup: Setup) -> Training:
    """Build thinwire's optimizer, which exchanges compressed updates."""
    module = DDP(setup.model, **setup.ddp) if setup.group is None else setup.model
    more = {"warmup_steps": setup.warmup_steps, "group": setup.group, "collective": _collective(method)}
    optimizer = _make(method, setup, module, compressor=method.spec, **more)

    def send() -> None:
        if setup.bucket is not None:  # else the hook of DDP has sent it
            optimizer.add_bucket(setup.bucket, first=True, last=True)
            optimizer.watch_gradients()

    return Training(module, optimizer, optimizer.sync, after_backward=send)


def _local(method: Method, setup: Setup, inner: Any) -> Training:
    optimizer = thinwire.LocalSteps(
        inner.optimizers if isinstance(inner, Several) else inner,
        method.every,
        compressor=method.spec,
        model=setup.model,
        group=setup.group,
        **{key: value for key, value in method.options.items() if key in OPTIONS},  # type: ignore[arg-type]
    )
    return Training(setup.model, optimizer, optimizer.sync, before_evaluation=optimizer.synchronize)


def _attached(method: Method, setup: Setup, optimizer: Any) -> Training:
    """Build torch's optimizer on gradients that thinwire compresses, or averages as they are between threads."""
    warmup = method.warmup(setup.warmup_steps)
    policy = thinwire.Policy(method.spec or "none", warmup=[(warmup, EIGHT_BITS)] if warmup else [])
    collective = _collective(method)
    if setup.group is None:
        module = DDP(setup.model, **setup.ddp)
        return Training(module, optimizer, thinwire.attach(module, policy, collective=collective))
    sync = thinwire.Synchronizer(policy, group=setup.group, collective=collective)

    def reduce() -> None:
        assert setup.bucket is not None
        sync.add_bucket(setup.bucket, first=True, last=True)
        sync.finish()

    return Training(setup.model, optimizer, sync, after_backward=reduce)


def _powersgd(method: Method, setup: Setup, optimizer: Any) -> Training:
    rank, dense_steps = int(method.name.split()[-1]), method.warmup(setup.warmup_steps)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=dense_steps, random_seed=0)
    module, whole = DDP(setup.model, **{**setup.ddp, "bucket_cap_mb": _ONE_BUCKET_MB}), setup.numel
    module.register_comm_hook(state, powerSGD_hook)

    def torch_bytes(steps: int) -> float:
        left_out = state.total_numel_before_compression - state.total_numel_after_compression
        return setup.ring(4 * (steps * whole - left_out))

    return Training(module, optimizer, torch_bytes=torch_bytes)
