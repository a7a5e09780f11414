"""The model of one rank, with an optimizer and an exchange that depend on the compressor.

sparse (topk, randomk), default   thinwire's optimizer, which compresses its update
auto                              the same, which measures what to compress it with
none, quantize                    torch's optimizer, with compressed gradients

With --local-steps, it is torch's optimizer inside `thinwire.LocalSteps`, which compresses differences of weights.
With --shard, FSDP shards the model over the ranks of a replica, and the optimizer is always thinwire's.

CPU and CUDA use DDP, so that the exchange overlaps with the backward pass; local steps need none. Where torch cannot
exchange tensors of the device, as with MPS, a copy of the model in CPU memory runs the exchange and the step.
"""

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.compressors import format_spec
from thinwire.optim.torch_states import check_saved
from thinwire.sync.checkpoint import DamagedError
from thinwire.sync.policy import DEFAULT
from thinwire.sync.synchronizer import Synchronizer

from .checks import DENSE, check_world, local_compressor, sends_updates
from .config import Config
from .data import Batch, evaluate_batch
from .models import model_config

MOMENTUM = 0.9
"""Momentum of SGD, both torch's and thinwire's."""


class Learner:
    """The model of one rank, with its optimizer and its exchange.

    through_host   whether the exchange goes through a copy of the model in CPU memory; by default only with MPS.
    """

    def __init__(self, config: Config, device: torch.device, through_host: bool | None = None) -> None:
        self._config, self._device = config, device
        build = model_config(config.model).build
        self.model: nn.Module = build(config.seed).to(device)
        through_host = device.type == "mps" if through_host is None else through_host
        self._twin: nn.Module | None = build(config.seed) if through_host else None
        self._module: nn.Module = self.model
        self._mesh: Any = None
        if config.shard > 1:
            check_world(config, dist.get_world_size())
            self._mesh = _shard_model(self.model, config.shard, device)
            self._whole = build(config.seed).to(device)  # FSDP's forward pass needs all ranks, an evaluation does not
        elif not through_host and not config.local_steps:
            self._module = DistributedDataParallel(self.model, gradient_as_bucket_view=True, **_own_buffers())
        self._optimizer, self.sync = self._make_optimizer()
        self._is_ours = isinstance(self._optimizer, thinwire.AdamW | thinwire.SGD | thinwire.LocalSteps)
        self._exchange: Any = self._optimizer if self._is_ours else self.sync
        self._base_lr = [float(group["lr"]) for group in self._optimizer.param_groups]
        torch.manual_seed(config.seed + 1_000_003 * dist.get_rank())

    def learn(self, batch: Batch, lr_factor: float, before_backward: Callable[[float], None]) -> None:
        """Run one training step. Compressed gradients that are not finite on a rank leave all weights unchanged.

        lr_factor         factor of the learning rate.
        before_backward   called with the loss before the backward pass.
        """
        for group, lr in zip(self._optimizer.param_groups, self._base_lr, strict=True):
            group["lr"] = lr * lr_factor
        loss = self._loss(batch)
        before_backward(loss.item())
        self._optimizer.zero_grad()
        loss.backward()
        if self._twin is not None:
            self._hand_over(self._twin)
        if self._is_ours or self.sync.finite is not False:
            self._optimizer.step()
        if self._twin is not None:
            with torch.no_grad():
                for parameter, twin in zip(self.model.parameters(), self._twin.parameters(), strict=True):
                    parameter.copy_(twin)

    @property
    def delay(self) -> int:
        """Return the number of steps for which an exchange of local steps is under way.

        Half a round hides the time of the network. Rounds of less than four steps are too short: there ranks wait.
        """
        every = self._config.local_steps
        return every // 2 if every >= 4 else 0

    def synchronize(self) -> None:
        """Exchange local steps that were not exchanged yet, so that ranks have the same weights. All ranks call it."""
        self._optimizer.synchronize()

    def evaluate(self, batch: Batch) -> tuple[float, float, int]:
        """Return the sum of the losses, the number of correct predictions, and the number of targets."""
        return evaluate_batch(self.model if self._mesh is None else self._whole, batch, self._device)

    def weights(self) -> dict[str, Any]:
        """Return the state of the model; all ranks call this."""
        return self.model.state_dict() if self._mesh is None else _gather_weights(self.model)

    @contextmanager
    def evaluating(self, total: Callable[[list[float]], list[float]]) -> Iterator[None]:
        """Set the model up for evaluation, with the means over ranks of float buffers, and restore it afterwards.

        total   sums numbers over ranks.
        """
        if self._mesh is not None:
            self._whole.load_state_dict(_gather_weights(self.model))
            self._whole.eval()
        floats = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        own = [buffer.clone() for buffer in floats]
        if floats:
            size = dist.get_world_size()
            summed = torch.tensor(total(torch.cat([buffer.flatten().double().cpu() for buffer in floats]).tolist()))
            for buffer, part in zip(floats, summed.split([buffer.numel() for buffer in floats]), strict=True):
                buffer.copy_(part.view_as(buffer) / size)
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()
            for buffer, kept in zip(floats, own, strict=True):
                buffer.copy_(kept)

    # Content of a checkpoint.

    def shared_state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is the same on all ranks, but for buffers and weights of local steps."""
        theirs = {} if self._is_ours else {"optimizer": self._optimizer.state_dict()}
        return {"model": self.weights(), **theirs}

    def own_state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that belongs to this rank."""
        return {
            "exchange": self._exchange.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "random": _random_state(self._device),
        }

    def add_common_state(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a checkpoint, with a second state that another number of ranks can load.

        It is that after `synchronize()`: training must not go on from here, or it has other bits. All ranks call this.
        """
        own = copy.deepcopy(own)  # synchronize() changes the tensors in it
        self.synchronize()
        return {**own, "common": self._optimizer.state_dict()}

    def load(self, shared: dict[str, Any], own: Sequence[dict[str, Any]], same_world: bool) -> None:
        """Load a checkpoint; raise ValueError if it is that of another model or compressor.

        own          states of the old ranks that this rank continues from.
        same_world   whether the world size is the same; only then are the random number generators restored.
        """
        try:
            if self._mesh is None:
                self.model.load_state_dict(shared["model"])
            else:
                _scatter_weights(self.model, shared["model"])
        except RuntimeError as error:
            reason = " ".join(str(error).partition(":")[2].split())  # after "Error(s) in loading state_dict for ..."
            raise ValueError(f"the weights are not those of the model: {reason}") from None
        if self._twin is not None:
            self._twin.load_state_dict(shared["model"])
        if not self._is_ours:
            check_saved(shared["optimizer"], self._optimizer)
            self._optimizer.load_state_dict(shared["optimizer"])
        kind = "exchange" if same_world or "common" not in own[0] else "common"
        self._exchange.load_state_dict([state[kind] for state in own])
        for group in self._optimizer.param_groups:  # may differ from the checkpoint's, as lr may
            group["weight_decay"] = self._config.weight_decay
        has_floats = isinstance(self._optimizer, thinwire.LocalSteps)  # in its state
        for name, buffer in self.model.named_buffers():
            if not (has_floats and buffer.is_floating_point()):
                buffer.copy_(own[0]["buffers"][name])
        if same_world:
            _set_random_state(own[0]["random"], self._device)

    # Description.

    def describe_compressor(self) -> str:
        """Return the compressor as it was given; "default" is followed by the compressor for this world size."""
        given, policy, every = self._config.compressor, self.sync.policy, self._config.local_steps
        is_short = policy.by_ranks or (every and given == DEFAULT)
        spec = f"{given} ({format_spec(policy.final)})" if is_short else given
        return f"{spec} after every {every} local step{'s' * (every > 1)}" if every else spec

    def _make_optimizer(self) -> tuple[Any, Synchronizer]:
        config, target = self._config, self._module if self._twin is None else self._twin
        given: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        if config.optimizer == "sgd":
            given["momentum"] = MOMENTUM
        theirs: Any = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.SGD
        if config.local_steps:
            local = thinwire.LocalSteps(
                theirs(target.parameters(), **given),
                every=config.local_steps,
                delay=self.delay,
                compressor=local_compressor(config),
                model=target,
            )
            return local, local.sync
        if sends_updates(config.compressor) or self._mesh is not None:
            ours: Any = thinwire.AdamW if config.optimizer == "adamw" else thinwire.SGD
            group = None if self._mesh is None else self._mesh["replicate"]
            warmup_steps = 0 if config.compressor == DENSE else config.warmup_steps
            optimizer = ours(target, **given, group=group, compressor=config.compressor, warmup_steps=warmup_steps)
            return optimizer, optimizer.sync
        is_ddp = isinstance(target, DistributedDataParallel)
        sync = thinwire.attach(target, config.compressor) if is_ddp else Synchronizer(config.compressor)
        return theirs(target.parameters(), **given), sync

    def _loss(self, batch: Batch) -> Tensor:
        inputs, targets = (part.to(self._device, non_blocking=True) for part in batch)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.precision == "bfloat16"):
            scores = self._module(inputs)
        return F.cross_entropy(scores.float().flatten(0, -2), targets.flatten())

    def _hand_over(self, twin: nn.Module) -> None:
        """Move the gradients to the copy in CPU memory, and all-reduce them there unless the optimizer does it."""
        for parameter, other in zip(self.model.parameters(), twin.parameters(), strict=True):
            assert parameter.grad is not None
            other.grad = parameter.grad.detach().to("cpu", copy=True)
            parameter.grad = None
        if not self._is_ours:
            self.sync.all_reduce_gradients(twin)


def _own_buffers() -> dict[str, Any]:
    """Return DDP's option that keeps it from sending rank 0's buffers to all ranks. Newer versions have renamed it."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}


def _shard_model(model: nn.Module, shard: int, device: torch.device) -> Any:
    """Shard a model over groups of `shard` ranks, block by block, and return the mesh of (replicate, shard)."""
    from torch.distributed.fsdp import fully_shard  # takes seconds to load

    shape = dist.get_world_size() // shard, shard
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    for part in (*getattr(model, "blocks", ()), model):
        fully_shard(part, mesh=mesh["shard"])
    return mesh


@torch.no_grad()
def _gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a sharded model with whole tensors. All ranks of a replica call this."""
    state: dict[str, Any] = model.state_dict()
    return {name: part.full_tensor() if hasattr(part, "full_tensor") else part for name, part in state.items()}


def _scatter_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load whole tensors into a sharded model, of which each rank takes its shard; raise errors as load_state_dict."""
    from torch.distributed.tensor import distribute_tensor

    loaded = dict(weights)
    for name, like in model.state_dict().items():
        if hasattr(like, "device_mesh") and name in weights and weights[name].shape == like.shape:
            whole = weights[name].to(like.device)
            loaded[name] = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    model.load_state_dict(loaded)


def _random_state(device: torch.device) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    try:
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
    except ValueError as error:
        raise DamagedError(f"the state of a random number generator: {error}") from None
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
