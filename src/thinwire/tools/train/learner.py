"""The model of one rank, with an optimizer and an exchange that depend on the compressor (docs/train.md).

With --shard, FSDP shards the model over the ranks of a replica, and the optimizer is always thinwire's.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.collectives import LocalGroup
from thinwire.compressors import format_spec
from thinwire.optim.states import check_saved
from thinwire.sync.policy import DEFAULT
from thinwire.sync.synchronizer import Synchronizer

from .checks import DENSE, sends_updates
from .config import Config
from .data import Batch, evaluate_batch
from .models import model_config

MOMENTUM = 0.9  # Momentum of SGD, both torch's and thinwire's
LOCAL_DEFAULT = "topk:ratio=1/64,bits=2"  # What `default` is with --local-steps, for any number of ranks
_RAMP, _FLOOR = 0.05, 0.1


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: it rises in a twentieth of the steps, then falls to a tenth by a cosine.

    >>> [round(schedule(step, 100), 3) for step in (0, 4, 50, 99)]
    [0.2, 1.0, 0.587, 0.1]
    """
    ramp = max(1, round(_RAMP * steps))
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, steps - ramp)
    return _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2


def make_optimizer(config: Config, model: nn.Module, group: Any = None, **more: Any) -> tuple[Any, Synchronizer]:
    """Return the optimizer, thinwire's with `more` options or torch's, and the synchronizer."""
    given: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    theirs: Any = torch.optim.AdamW
    ours: Any = thinwire.AdamW
    compressor = config.compressor
    if config.optimizer == "sgd":
        theirs, ours, given["momentum"] = torch.optim.SGD, thinwire.SGD, MOMENTUM
    if not config.local_steps and (sends_updates(compressor) or config.shard > 1):
        given |= {"compressor": compressor, "warmup_steps": 0 if compressor == DENSE else config.warmup_steps, **more}
        updates = ours(model, group=group, **given)
        return updates, updates.sync
    optimizer = theirs(model.parameters(), **given)
    if config.local_steps:
        made = LOCAL_DEFAULT if compressor == DEFAULT else compressor
        local = thinwire.LocalSteps(
            optimizer, every=config.local_steps, delay=delay(config), compressor=made, model=model, group=group
        )
        return local, local.sync
    is_ddp = isinstance(model, DistributedDataParallel)
    return optimizer, thinwire.attach(model, compressor) if is_ddp else Synchronizer(compressor, group=group)


def delay(config: Config) -> int:
    """Return the number of steps for which an exchange of local steps is under way: half a round, if it has four."""
    return config.local_steps // 2 if config.local_steps >= 4 else 0


class Learner:
    """The model of one rank, with its optimizer and its exchange."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._device = config, device
        build = model_config(config.model).build
        self.model: nn.Module = build(config.seed).to(device)
        self._module, group = self.model, None
        self._whole: nn.Module | None = None
        if config.shard > 1:
            mesh = _shard_model(self.model, config.shard, device)
            group = mesh["replicate"]
            self._whole = build(config.seed).to(device)  # FSDP's forward pass needs all ranks, an evaluation does not
        elif not config.local_steps:
            self._module = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            self._module.broadcast_buffers = False  # the argument of this name is deprecated
        self._optimizer, self.sync = make_optimizer(config, self._module, group)
        self._is_ours = isinstance(self._optimizer, thinwire.AdamW | thinwire.SGD | thinwire.LocalSteps)
        self._exchange: Any = self._optimizer if self._is_ours else self.sync
        self._base_lr = [float(group["lr"]) for group in self._optimizer.param_groups]

    def learn(self, batch: Batch, lr_factor: float, before_backward: Callable[[float], None]) -> None:
        """Run one step; `before_backward` gets its loss. If compressed gradients are not finite, no weight changes."""
        for group, lr in zip(self._optimizer.param_groups, self._base_lr, strict=True):
            group["lr"] = lr * lr_factor
        loss = self._loss(batch)
        before_backward(loss.item())
        self._optimizer.zero_grad()
        loss.backward()
        if self._is_ours or self.sync.finite is not False:
            self._optimizer.step()

    def synchronize(self) -> None:
        """Exchange local steps that were not exchanged yet, if there are any, so that ranks have the same weights."""
        if self._config.local_steps:
            self._optimizer.synchronize()

    def evaluate(self, batches: Iterable[Batch]) -> list[float]:
        """Return the sum of the losses, the number of correct predictions, and the number of targets."""
        found = [evaluate_batch(self._whole or self.model, batch, self._device) for batch in batches]
        return [sum(parts) for parts in zip((0.0, 0.0, 0.0), *found, strict=True)]

    @contextmanager
    def evaluating(self, total: Callable[[list[float]], list[float]]) -> Iterator[None]:
        """Set the model up for evaluation, with the means over ranks of float buffers, and restore it afterwards."""
        if self._whole is not None:
            self._whole.load_state_dict(self.weights())
            self._whole.eval()
        floats = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        own = [buffer.clone() for buffer in floats]
        if floats:
            summed = torch.tensor(total(torch.cat([buffer.flatten().double().cpu() for buffer in floats]).tolist()))
            for buffer, part in zip(floats, summed.split([buffer.numel() for buffer in floats]), strict=True):
                buffer.copy_(part.view_as(buffer) / dist.get_world_size())
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()
            for buffer, kept in zip(floats, own, strict=True):
                buffer.copy_(kept)

    def weights(self) -> dict[str, Any]:
        """Return the state of the model, of whole tensors; all ranks call this."""
        state: dict[str, Any] = self.model.state_dict()
        with torch.no_grad():
            return {name: part.full_tensor() if hasattr(part, "full_tensor") else part for name, part in state.items()}

    def shared_state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is the same on all ranks, but for buffers and weights of local steps."""
        theirs = {} if self._is_ours else {"optimizer": self._optimizer.state_dict()}
        return {"model": self.weights(), **theirs}

    def own_state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that belongs to this rank. Training draws no random numbers of torch's."""
        return {"exchange": self._exchange.state_dict(), "buffers": dict(self.model.named_buffers())}

    def add_common_state(self, own: dict[str, Any]) -> dict[str, Any]:
        """Synchronize and add that state, which another number of ranks can load. Training must not go on from it."""
        own = copy.deepcopy(own)  # synchronize() changes the tensors in it
        self.synchronize()
        return {**own, "common": self._optimizer.state_dict(), "world_size": dist.get_world_size()}

    def load(self, shared: dict[str, Any], own: Sequence[dict[str, Any]]) -> None:
        """Load a checkpoint: the shared state, and those of the old ranks that this rank continues from.

        Raises RuntimeError if it is that of another model, ValueError if it is that of another compressor.
        """
        self.model.load_state_dict(_shards_of(shared["model"], self.model))
        if not self._is_ours:
            check_saved(shared["optimizer"], self._optimizer)
            self._optimizer.load_state_dict(shared["optimizer"])
        size = dist.get_world_size()
        kind = "exchange" if own[0].get("world_size", size) == size else "common"
        self._exchange.load_state_dict([state[kind] for state in own])
        for group in self._optimizer.param_groups:  # may differ from the checkpoint's, as lr may
            group["weight_decay"] = self._config.weight_decay
        has_floats = isinstance(self._optimizer, thinwire.LocalSteps)  # in its state
        for name, buffer in self.model.named_buffers():
            if not (has_floats and buffer.is_floating_point()):
                buffer.copy_(own[0]["buffers"][name])

    def describe_compressor(self) -> str:
        """Return the compressor as it was given; "default" is followed by the compressor for this world size."""
        given, every = self._config.compressor, self._config.local_steps
        spec = f"{given} ({format_spec(self.sync.policy.final)})" if given == DEFAULT else given
        return spec + (f" after every {every} local steps" if every else "")

    def _loss(self, batch: Batch) -> Tensor:
        inputs, targets = (part.to(self._device, non_blocking=True) for part in batch)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.precision == "bfloat16"):
            scores = self._module(inputs)
        return F.cross_entropy(scores.float().flatten(0, -2), targets.flatten())


def _shard_model(model: nn.Module, shard: int, device: torch.device) -> Any:
    """Shard a model over groups of `shard` ranks, block by block, and return the mesh of (replicate, shard)."""
    from torch.distributed.fsdp import fully_shard  # takes seconds to load

    world_size = dist.get_world_size()
    if world_size % shard:
        raise ValueError(f"--shard {shard} with {world_size} ranks, expected a divisor of their number")
    mesh = init_device_mesh(device.type, (world_size // shard, shard), mesh_dim_names=("replicate", "shard"))
    for part in (*getattr(model, "blocks", ()), model):
        fully_shard(part, mesh=mesh["shard"])
    return mesh


def _shards_of(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return whole tensors as this rank's shards, where the model has shards of the same shape."""
    loaded = dict(weights)
    for name, like in model.state_dict().items():
        if hasattr(like, "device_mesh") and name in weights and weights[name].shape == like.shape:
            from torch.distributed.tensor import distribute_tensor

            whole = weights[name].to(like.device)
            loaded[name] = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return loaded


def rehearse(group: LocalGroup, config: Config, device: torch.device) -> None:
    """Train a small layer for some steps, with a warm-up and a refresh, so that all kernels of a run are compiled."""
    model = nn.Linear(64, 256, device=device)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    config = replace(config, warmup_steps=1, local_steps=min(1, config.local_steps))
    more = {"refresh_every": 2} if config.optimizer == "adamw" else {}
    optimizer, sync = make_optimizer(config, model, group, **more)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.arange(64.0, device=device) + step + group.rank).square().mean().backward()
        if not hasattr(optimizer, "sync"):
            sync.all_reduce_gradients(model)
        optimizer.step()
