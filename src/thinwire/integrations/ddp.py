"""DDP: communication hooks that hand its buckets to a `Synchronizer` or to an optimizer.

DDP waits for the hook's futures at the end of the backward pass. Gradients arrive unaveraged. (torch compares the
hook's annotations as objects, so this module must not postpone their evaluation.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..sync.buckets import Bucket, plain_name, shaped
from ..sync.synchronizer import Synchronizer


def after_backward(action: Callable[[], None]) -> None:
    """Run an action after all that DDP or FSDP does after backward: a callback queued by a callback comes last."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(action))


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
