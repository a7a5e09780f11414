"""Checks of a user's mistakes: arguments that cannot be, and use by which training would go wrong unnoticed.

Each says what was given, what was expected, and what to do.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..collectives.collective import Collective
from ..compressors import NoCompression, format_spec
from ..compressors import compressor as parsed
from ..integrations.ddp_models import ddp_made, ddp_of
from ..integrations.fsdp import ShardedParameters
from ..sync.buckets import Bucket
from ..sync.policy import Policy
from ..sync.shards import local_of
from ..sync.synchronizer import Synchronizer
from .fragments import Named

_LARGEST = 1e18  # larger whole numbers are none that torch takes


def check_numbers(given: Mapping[str, Any], *names: str, below: float = _LARGEST) -> None:
    """Raise ValueError unless the numbers of these names are 0 or more, and less than `below`."""
    for name in names:
        number = given[name]
        if isinstance(number, bool) or not isinstance(number, (int, float, Tensor)) or not 0 <= float(number) < below:
            expected = "0 or more" if below == _LARGEST else f"0 to below {below:g}"
            raise ValueError(f"{name} {number!r}, expected {expected}")


def check_betas(given: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless these are two numbers from 0 to below 1."""
    for name in names:
        if not isinstance(given[name], (tuple, list)) or len(given[name]) != 2:
            raise ValueError(f"{name} {given[name]!r}, expected two numbers")
        betas = {f"beta{index} of {name}": beta for index, beta in enumerate(given[name], start=1)}
        check_numbers(betas, *betas, below=1.0)


_REFUSED = {
    "amsgrad": "the largest second moment so far is not kept, since ranks average theirs only from time to time; leave "
    "it out",
    "dampening": "a residual delays the gradient by itself; leave it out",
    "maximize": "call backward on the negative loss instead",
    "capturable": "a step that exchanges with other ranks cannot be part of a CUDA graph; leave it out",
    "differentiable": "no gradient passes through an exchange; leave it out",
}


def check_torch_options(given: Mapping[str, object]) -> None:
    """Raise ValueError for an option of torch's optimizer that thinwire's does not have, unless it is off."""
    for name, value in given.items():
        if name in Collective.__dataclass_fields__:
            raise TypeError(f"{name}={value!r}, expected collective=thinwire.Collective({name}={value!r})")
        if name in ("foreach", "fused"):  # other implementations of the same step
            continue
        if name not in _REFUSED:
            raise TypeError(f"unknown argument {name!r}")
        if value:
            raise ValueError(f"{name}={value!r}, which thinwire does not have: {_REFUSED[name]}")


def check_norm(max_grad_norm: float | None) -> None:
    """Raise ValueError for a norm to which no gradient can be clipped."""
    if max_grad_norm is not None and (not isinstance(max_grad_norm, (int, float)) or not max_grad_norm > 0):
        raise ValueError(f"max_grad_norm {max_grad_norm!r}, expected a number above 0, or None")


def check_order(policy: Policy) -> None:
    """Raise ValueError if gradients follow updates, after which momentum differs between ranks."""
    phases = [parsed(given) for _, given in policy.warmup]
    phases += [policy.final] if isinstance(policy.final, NoCompression) else []
    first = next((index for index, given in enumerate(phases) if given.sparse), len(phases))
    later = [given for given in phases[first:] if not given.sparse]
    if later or (policy.auto and phases[first:]):
        before = "auto, which tries to send gradients first" if policy.auto else format_spec(later[0])
        where = "" if policy.auto else ", or move them to its end"
        raise ValueError(
            f"{format_spec(phases[first])} before {before}: an optimizer cannot return from updates to gradients; "
            f"remove the sparse phases from the warm-up{where}"
        )


def check_first(policy: Policy) -> None:
    """Raise ValueError if the first steps send updates, which are divided by a second moment of gradients."""
    first = parsed(policy.warmup[0][1]) if policy.warmup else policy.final  # auto begins with dense
    if (not policy.warmup or first.sparse) and not isinstance(first, NoCompression):
        raise ValueError(
            f"the first steps would send {format_spec(first)}, but the second moment needs gradients first: set "
            "warmup_steps to 1 or more, or give a Policy whose warm-up begins with quantize:bits=8 or none"
        )


def check_groups(saved: list[dict[str, Any]], here: list[dict[str, Any]]) -> None:
    """Raise ValueError if the parameter groups of a checkpoint hold other parameters than those here."""
    if len(saved) != len(here):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, here there are {len(here)}")
    for number, (theirs, ours) in enumerate(zip(saved, here, strict=True)):
        names = theirs["param_names"]
        if list(names) != list(ours["param_names"]):
            differs = sorted(set(names) ^ set(ours["param_names"])) or ["the same in another order"]
            raise ValueError(
                f"parameter group {number} of the checkpoint holds other parameters than here: {', '.join(differs[:3])}"
            )


def check_replicas(sync: Synchronizer, named: Named) -> None:
    """Raise ValueError if parameters differ between ranks, because they would stay different unnoticed."""
    sums, mean = _digests(sync, [p for _, p in named])
    apart = sync.mean_of(((sums - mean).abs() > 1e-9 * (1.0 + mean.abs())).double())
    for (name, _), differs in zip(named, apart.tolist(), strict=True):
        if differs:
            raise ValueError(
                f"parameter {name!r} differs between ranks before the first step; start all ranks from the same "
                "weights (the same seed, a broadcast, or DDP, which does it)"
            )


def _digests(sync: Synchronizer, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return weighted sums of the elements of tensors, which depend on their order too, and their means over ranks."""

    def digest(tensor: Tensor) -> Tensor:
        flat = tensor.detach().double().reshape(-1)
        return flat @ torch.arange(flat.numel(), device=flat.device).remainder(1009).add(1).double()

    sums = torch.stack([digest(tensor) for tensor in tensors])
    return sums, sync.mean_of(sums)


class Guard:
    """Checks of one optimizer between its steps.

    Gradients are compared with those that were sent, by identity and by torch's count of their changes.
    """

    def __init__(
        self, optimizer: str, sync: Synchronizer, given: Mapping[str, Tensor], sharded: ShardedParameters | None
    ) -> None:
        self._optimizer, self._sync, self._given, self._sharded = f"thinwire.{optimizer}", sync, given, sharded
        self.trained = {name for name, parameter in given.items() if parameter.requires_grad}  # when DDP was made
        self._sent: dict[str, tuple[Tensor | None, int]] = {}  # and how often each had changed by then
        self._searched: int | None = None  # the `ddp_made` at which the parameters were last searched in DDP models

    # Before gradients are sent.

    def check_begin(self, ddp: DistributedDataParallel | None, *, is_alone: bool) -> None:
        """Raise RuntimeError if a step cannot begin."""
        if getattr(getattr(ddp, "_join_config", None), "enable", False):
            raise RuntimeError(
                f"ddp.join() with {self._optimizer}: a rank that has no more data could not step "
                "with the others; give all ranks as many batches, or use thinwire.attach"
            )
        if is_alone and dist.is_initialized():
            raise RuntimeError(
                "torch.distributed was initialised after this optimizer was made, for a process without others: make "
                f"{self._optimizer} after init_process_group"
            )
        if self._sync.is_pending:
            raise RuntimeError(
                "a second exchange before step(): the gradients of the first were sent; exchange once per step, with "
                "DDP by no_sync() around forward and backward for all but the last, with FSDP by "
                "set_requires_gradient_sync(False); checkpoint() needs use_reentrant=False with FSDP"
            )
        if self._sharded is not None and self._is_first:
            check_replicas(self._sync, list(self._sharded.tensors.items()))

    def check_plain(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raise an error if gradients that no hook has sent were averaged before, or ranks began with other weights."""
        made = ddp_made()[0]  # to search takes long, so only after another one was made
        if self._searched != made and ddp_of([p for _, p in named]) is not None:
            raise RuntimeError(
                "the model was wrapped in DistributedDataParallel after this optimizer was made, so DDP has sent the "
                f"gradients too, dense: make {self._optimizer} after DistributedDataParallel(model)"
            )
        self._searched = made
        if self._is_first:
            check_replicas(self._sync, named)
            self._warn_of_averaged(named)

    @property
    def _is_first(self) -> bool:
        return self._sync.steps == 0 and self._sync.stats.skipped == 0 and self._sync.world_size > 1

    def check_bucket(self, bucket: Bucket) -> None:
        """Raise RuntimeError if DDP sends zeros for a frozen parameter, which momentum would still move."""
        frozen = next((name for name in bucket.names if not self._given[name].requires_grad), None)
        if frozen is not None:
            self._sync.drop()
            raise RuntimeError(
                f"parameter {frozen!r} was frozen after DistributedDataParallel(...) was made, which goes on to "
                "exchange it: freeze it before that, or save the state, make DDP and the optimizer anew, and load it"
            )

    # Before a step is taken.

    def record(self) -> None:
        """Remember the gradients, which were sent."""
        grads = {name: parameter.grad for name, parameter in self._given.items()}
        self._sent = {name: (grad, -1 if grad is None else self._local(grad)._version) for name, grad in grads.items()}

    def _local(self, grad: Tensor) -> Tensor:
        return grad if self._sharded is None else local_of(grad)

    def forget(self) -> None:
        self._sent = {}
        if self._sharded is not None:
            self._sharded.forget_buckets()

    def check_sent(self, *, by_ddp: bool, by_fsdp: bool) -> None:
        """Raise RuntimeError if a backward pass should have sent gradients, and has not."""
        if by_ddp:
            raise RuntimeError(f"no gradients were exchanged since the last step: {self._why_ddp_waits()}")
        if by_fsdp:
            raise RuntimeError(
                "no gradients were exchanged since the last step: the last backward pass before step() must be the "
                "sharded model's, after set_requires_gradient_sync(True). get_optimizer_state_dict and "
                "set_optimizer_state_dict would lose residuals, and are not for this optimizer: save "
                "thinwire.per_rank(optimizer), and load thinwire.load_per_rank(..., owner=optimizer)"
            )

    def _why_ddp_waits(self) -> str:
        """Return why DDP has not sent all gradients, as far as they tell: it waits for those that are missing."""
        missing = [name for name in self._given if name in self.trained and self._given[name].grad is None]
        if not missing or len(missing) == len(self.trained):
            return (
                "the last backward pass before step() must be the DDP model's, and neither it nor its forward pass "
                "under no_sync()"
            )
        frozen = [name for name in missing if not self._given[name].requires_grad]
        named = ", ".join(map(repr, (frozen or missing)[:3])) + (" and more" if len(frozen or missing) > 3 else "")
        if frozen:
            return f"DDP waits for {named}, frozen after DistributedDataParallel(...) was made: freeze before that"
        return (
            f"DDP waits for the gradient of {named}, which this backward pass did not use: give "
            "DistributedDataParallel find_unused_parameters=True, or freeze what is not used before it is made"
        )

    def check_scaler(self, optimizer: object) -> None:
        """Raise ValueError if a GradScaler, which sets `grad_scale` while it calls step, is not known or came early."""
        if not hasattr(optimizer, "grad_scale"):
            return
        if self._sync.grad_scaler is None:
            raise ValueError("a GradScaler calls step(); give it to the optimizer too: grad_scaler=scaler")
        if optimizer.grad_scale is None:
            self._sync.drop()
            raise ValueError(
                "scaler.unscale_(optimizer) was called, but the gradients were sent before that; leave it out, and to "
                "clip give the optimizer max_grad_norm"
            )

    def check_gradients(self, *, is_checked_by_scaler: bool) -> None:
        """Raise RuntimeError if gradients have changed since they were sent, because the step would be wrong."""
        fault = self._fault(self._sync.pending_names, is_checked_by_scaler)
        if fault is None and self._sharded is not None and (changed := self._sharded.changed()) is not None:
            fault = self._changed(repr(changed))
        if fault is not None:
            self._sent = {}
            self._sync.drop()
            raise RuntimeError(fault)

    def _fault(self, sent: Collection[str], is_checked_by_scaler: bool) -> str | None:
        """Return what is wrong with the gradients, if anything; a GradScaler's look for Inf may count as a change."""
        for name, parameter in self._given.items():
            grad = parameter.grad
            if name not in sent:
                if grad is not None:
                    return (
                        f"parameter {name!r} has a gradient that was not exchanged: set its .grad to None, or, "
                        "to train it with DDP, set requires_grad before DistributedDataParallel(...) is made"
                    )
            elif name not in self._sent:
                return "the backward pass did not come to an end: call zero_grad(), and backward again"
            elif grad is not self._sent[name][0] or not self._is_as_sent(name, is_checked_by_scaler):
                beside = ", or of one beside it in memory," if grad is not None and self._sharing(grad) > 1 else ""
                return self._changed(f"{name!r}{beside}")
        return None

    def _changed(self, which: str) -> str:
        return (
            f"the gradient of {which} was changed after it was exchanged, as clip_grad_norm_ does; what was sent is "
            f"the gradient before that. To clip, leave clip_grad_norm_ out and give {self._optimizer} "
            "max_grad_norm=; to know the norm, torch.nn.utils.get_total_norm; to scale, scale the loss"
        )

    def _is_as_sent(self, name: str, is_checked_by_scaler: bool) -> bool:
        grad, before = self._sent[name]
        changes = 0 if grad is None else self._local(grad)._version - before
        if grad is None or not changes or not is_checked_by_scaler:
            return not changes
        counted = _changes_by_scaler(grad.device)  # to find Inf, GradScaler has multiplied all gradients by 1
        return counted > 0 and changes in (counted, counted * self._sharing(grad))

    def _sharing(self, grad: Tensor) -> int:
        """Return how many gradients share this one's memory, because torch counts changes of all views together."""
        grads = [self._local(each) for p in self._given.values() if (each := p.grad) is not None]
        memory = self._local(grad).untyped_storage().data_ptr()
        return sum(each.untyped_storage().data_ptr() == memory for each in grads)

    def _warn_of_averaged(self, named: Named) -> None:
        """Warn if gradients are alike on all ranks before they are exchanged: then DDP has averaged them, dense."""
        grads = [p.grad for _, p in named if p.grad is not None]
        if not grads:
            return
        mine, mean = _digests(self._sync, grads)
        if bool(mine.any()) and torch.allclose(mine, mean, rtol=1e-12, atol=0.0):
            warnings.warn(
                "gradients are the same on all ranks before they are exchanged. If DDP has averaged them, nothing is "
                f"saved: give the DDP model itself, {self._optimizer}(ddp, ...), or ddp=",
                stacklevel=5,
            )


@cache
def _changes_by_scaler(device: torch.device) -> int:
    """Return how often GradScaler's check for Inf counts as a change; that depends on the version of torch."""
    probe = torch.ones(1, device=device)
    before = probe._version
    found, scale = torch.zeros(1, device=device), torch.ones(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_([probe], found, scale)
    return int(probe._version - before)
