"""`attach`: compressed gradients for any optimizer, of a model in DDP or sharded by FSDP2."""

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..collectives.collective import DEFAULT_COLLECTIVE, Collective
from ..collectives.groups import Group
from ..compressors import compressor as parsed
from ..compressors import format_spec
from ..sync.buckets import plain_name
from ..sync.policy import Policy, Spec
from ..sync.synchronizer import Synchronizer
from .ddp import register_ddp_hook
from .fsdp import AttachedModel, ShardedParameters, check_module, sharded_parameters

_ADAM_LIKE = (
    torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.Adagrad,
)  # fmt: skip


def attach(
    ddp: nn.Module,
    compressor: Spec | Policy,
    *,
    group: Group = None,
    error_feedback: bool = True,
    grad_scaler: GradScaler | None = None,
    collective: Collective = DEFAULT_COLLECTIVE,
) -> Synchronizer:
    """Make a DDP model exchange compressed gradients; use it with any optimizer, as before.

    ddp          the model; it takes one hook, before its first backward pass. Or a model sharded by `fully_shard`,
                 whose shards are exchanged between replicas.
    compressor   a spec such as "quantize:bits=8", a `Compressor` or a `Policy`. "auto" chooses dense or 8 bits by the
                 times of the first steps; `choice` of the returned synchronizer has the reason. A step without
                 compression is DDP's own, with its bits, time-out and errors.
    group        for nodes with a fast network inside: a mesh or a pair of groups over the ranks of the model's group.
                 Of a sharded model, the ranks that hold the same shard of the other replicas: `mesh["replicate"]`.
    others       see `Synchronizer`.

    If any rank's gradient holds NaN or Inf, all gradients are NaN on every rank and `sync.finite` is False. Skip the
    optimizer's step then; `GradScaler` does so by itself.

    For Adam with top-k use `thinwire.AdamW` instead, which compresses its update, because sparse gradients spoil Adam's
    second moment.
    """
    ddp = getattr(ddp, "_orig_mod", ddp)  # the model inside torch.compile's wrapper
    sharded = None
    if not isinstance(ddp, DistributedDataParallel):
        sharded = _sharded(ddp, group)
    elif group is None:
        group = ddp.process_group
    sync = Synchronizer(
        compressor,
        group=group,
        error_feedback=error_feedback,
        grad_scaler=grad_scaler,
        collective=collective,
        shards=None if sharded is None else sharded.group,
    )
    if sharded is not None:
        ddp._thinwire = AttachedModel(sharded, sync)  # kept as long as the model
    elif isinstance(ddp, DistributedDataParallel):
        register_ddp_hook(ddp, sync)
    _warn_of_adam(ddp, sync)
    return sync


def _sharded(model: object, group: Group) -> ShardedParameters:
    """Return the parameters of a model sharded by FSDP2; raise ValueError for another model."""
    found = None
    if isinstance(model, nn.Module):
        check_module(model)
        found = sharded_parameters({plain_name(name): p for name, p in model.named_parameters()}, group)
    if found is None:
        raise ValueError(
            f"a {type(model).__name__}, expected a DistributedDataParallel or a model sharded by fully_shard; for "
            "others use a Synchronizer"
        )
    if found.is_offloaded:
        raise ValueError(
            "gradients that FSDP offloads to the CPU are complete after the backward pass only: use thinwire.AdamW or "
            "thinwire.SGD, which exchange them in step()"
        )
    return found


_sparse: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()
"""Models with sparse gradients and the spec of their compressor, until an optimizer steps on them."""
_is_watching = False  # by `_warn_once`, before every step of an optimizer


def _warn_of_adam(ddp: nn.Module, sync: Synchronizer) -> None:
    """Prepare a warning for the first step of an Adam-like optimizer on parameters with sparse gradients."""
    global _is_watching
    final = map(parsed, (sync.policy.final, *sync.policy.overrides.values()))
    sparse = [given for given in final if given.sparse]
    if sparse:
        _sparse[ddp] = format_spec(sparse[0])
        if not _is_watching:
            register_optimizer_step_pre_hook(_warn_once)
            _is_watching = True


def _warn_once(optimizer: Optimizer, *_: Any) -> None:
    for ddp, spec in list(_sparse.items()):
        compressed = {id(parameter) for parameter in ddp.parameters()}
        if any(id(parameter) in compressed for group in optimizer.param_groups for parameter in group["params"]):
            del _sparse[ddp]
            if isinstance(optimizer, _ADAM_LIKE):
                warnings.warn(
                    f"{type(optimizer).__name__} on gradients compressed by {spec}: its second moment is computed "
                    "from sparse gradients, and training ends at a much higher loss (docs/training.md shows how much); "
                    "use thinwire.AdamW, which compresses its update instead, or quantize:bits=8",
                    stacklevel=4,
                )
