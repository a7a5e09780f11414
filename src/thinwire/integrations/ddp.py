"""DDP: communication hooks that hand its buckets to a `Synchronizer` or to an optimizer.

DDP waits for the hook's futures at the end of the backward pass. Gradients arrive unaveraged. (torch compares the
hook's annotations as objects, so this module must not postpone their evaluation.)
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..collectives.collective import DEFAULT_COLLECTIVE, Collective
from ..collectives.groups import Group
from ..compressors import compressor as parsed
from ..compressors import format_spec
from ..sync.buckets import Bucket, plain_name, shaped
from ..sync.policy import Policy, Spec
from ..sync.synchronizer import Synchronizer
from .fsdp import AttachedModel, ShardedParameters, after_backward, check_module, sharded_parameters

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


@dataclass
class _HookState:
    receiver: Any  # a `Synchronizer`, or an optimizer of thinwire
    names: dict[int, str]
    may_be_unused: bool
    waiting: list[tuple["Future[Tensor]", Bucket, Sequence[Tensor]]] = field(default_factory=list)
    error: Exception | None = None  # of this backward pass, raised after it: in a hook, it would leave DDP unusable

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leave everything out of a copy of the model, such as that of an AveragedModel, which has no hook either."""
        return object, ()


def register_ddp_hook(ddp: DistributedDataParallel, receiver: Any) -> None:
    """Register a synchronizer or an optimizer as the model's communication hook; refuse sparse gradients."""
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    everything = ddp.module.named_parameters()
    named = {plain_name(name): parameter for name, parameter in everything if name not in ignored}
    embeddings = (layer for layer in ddp.module.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)))
    sparse = {id(layer.weight) for layer in embeddings if layer.sparse}
    for name, parameter in named.items():
        if id(parameter) in sparse and parameter.requires_grad:
            raise ValueError(f"the gradient of {name!r} is sparse, expected a dense one: make its layer sparse=False")
    sync: Synchronizer = receiver if isinstance(receiver, Synchronizer) else receiver.sync
    sync.register_parameters(named.items())
    names = {id(parameter): name for name, parameter in named.items()}
    state, is_sync = _HookState(receiver, names, ddp.find_unused_parameters), isinstance(receiver, Synchronizer)
    if getattr(ddp, "_comm_hooks", ()):
        raise ValueError(
            "the DDP model has a communication hook already, and takes only one: leave out register_comm_hook and "
            "thinwire.attach if a thinwire optimizer is made for it, and make one optimizer for a DDP model"
        )
    ddp.register_comm_hook(state, _hook_of_sync if is_sync else _hook_of_optimizer)
    sync.may_send_by_torch = is_sync


def _hook_of_sync(
    state: _HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Send a bucket, and return a future of its averages. The last bucket waits for all, within the backward pass."""
    sync, (flat, future) = state.receiver, _send(state, bucket)
    if state.error is None and sync.sends_by_torch:
        if bucket.is_last():
            _attempt(state, sync.finish)
        # As DDP does without a hook, with the same bits: it divides before the sum. A failure is torch's.
        work = dist.all_reduce(flat.tensor.mul_(1.0 / sync.world_size), group=sync.group, async_op=True)
        done_by_torch: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return done_by_torch
    state.waiting.append((future, flat, bucket.parameters()))
    if bucket.is_last():
        waiting, state.waiting = state.waiting, []
        _attempt(state, sync.finish)
        for done, one, _ in waiting:
            if state.error is not None:
                one.tensor.fill_(torch.nan)  # some parts may be averages already, and others not
            done.set_result(one.tensor)
        if state.may_be_unused and state.error is None:
            after_backward(lambda: _write_unused(sync, waiting))
    return future


def _hook_of_optimizer(
    state: _HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Send a bucket, and return it unchanged in a future; the optimizer's `step` does the rest."""
    flat, future = _send(state, bucket)
    if bucket.is_last() and state.error is None:
        after_backward(state.receiver.watch_gradients)
    future.set_result(flat.tensor)
    return future


def _send(state: _HookState, bucket: Any) -> tuple[Bucket, "Future[Tensor]"]:
    """Send a bucket, unless one before it has failed; return it, and a future for DDP."""
    parameters, device, first = bucket.parameters(), bucket.buffer().device, bucket.index() == 0
    names, sizes = tuple(state.names[id(p)] for p in parameters), tuple(p.numel() for p in parameters)
    flat = Bucket(bucket.buffer(), names, sizes)
    if first:
        state.error, state.waiting = None, []
    _attempt(state, lambda: state.receiver.add_bucket(flat, first=first, last=bucket.is_last()))
    return flat, Future(devices=[device] if device.type == "cuda" else None)


def _attempt(state: _HookState, action: Callable[[], None]) -> None:
    """Run an action, unless one before it has failed; let an error be raised after the backward pass."""
    if state.error is not None:
        return
    try:
        action()
    except Exception as error:
        state.error = failed = error

        def raise_it() -> None:
            raise failed

        after_backward(raise_it)


def _write_unused(sync: Synchronizer, buckets: Sequence[tuple["Future[Tensor]", Bucket, Sequence[Tensor]]]) -> None:
    """Write the averages of parameters that no rank used, which DDP drops: they are not zero if residuals were sent."""
    if sync.finite is None:  # nothing is compressed, so there are no residuals
        return
    for _, bucket, parameters in buckets:
        for parameter, part in zip(parameters, bucket.parts().values(), strict=True):
            result = shaped(part, parameter)
            if parameter.grad is None:
                parameter.grad = result.clone() if bool(part.any()) else None
            elif parameter.grad.data_ptr() != result.data_ptr():
                parameter.grad.copy_(result)  # no change if any rank used it


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
