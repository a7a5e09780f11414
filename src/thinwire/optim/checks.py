"""Checks of an optimizer's arguments, and for mistakes that would stay unnoticed, before its first step or a load."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..collectives.collective import Collective
from ..compressors import NoCompression, format_spec
from ..compressors import compressor as parsed
from ..sync.policy import Policy, Spec
from ..sync.synchronizer import Synchronizer
from .fragments import Named

_LARGEST = 1e18  # larger whole numbers are none that torch takes


def check_number(name: str, given: float, *, below: float = _LARGEST) -> None:
    """Raise ValueError unless 0 <= given < below."""
    if isinstance(given, bool) or not isinstance(given, (int, float, Tensor)) or not 0 <= float(given) < below:
        expected = "0 or more" if below == _LARGEST else f"0 to below {below:g}"
        raise ValueError(f"{name} {given!r}, expected {expected}")


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


def dense_policy(policy: Policy) -> Policy:
    """Return a policy that compresses nothing, for a process without others."""
    none: dict[str, Any] = {"compressor": "none", "small_compressor": "none", "overrides": {}, "warmup": ()}
    return replace(policy, **none)


def policy_of(compressor: Spec | Policy, warmup_steps: int, warmup: Spec) -> Policy:
    """Return a policy with the optimizer's warm-up, unless it has its own. Raise ValueError for steps below 0."""
    if type(warmup_steps) is not int or warmup_steps < 0:
        raise ValueError(f"warmup_steps {warmup_steps!r}, expected a whole number, 0 or more")
    phases = ((warmup_steps, parsed(warmup)),) if warmup_steps else ()
    if not isinstance(compressor, Policy):
        return Policy(compressor, warmup=phases)
    if compressor.warmup:
        return compressor
    return replace(compressor, warmup=phases)


def check_replicas(sync: Synchronizer, named: Named) -> None:
    """Raise ValueError if parameters differ between ranks, because they would stay different unnoticed."""
    sums = torch.stack([_digest(p) for _, p in named])
    mean = sync.mean_of(sums)
    apart = sync.mean_of(((sums - mean).abs() > 1e-9 * (1.0 + mean.abs())).double())
    for (name, _), differs in zip(named, apart.tolist(), strict=True):
        if differs:
            raise ValueError(
                f"parameter {name!r} differs between ranks before the first step; start all ranks from the same "
                "weights (the same seed, a broadcast, or DDP, which does it)"
            )


def warn_of_averaged(sync: Synchronizer, named: Named, optimizer: str) -> None:
    """Warn if gradients are alike on all ranks before they are exchanged: then DDP has averaged them, dense."""
    grads = [p.grad for _, p in named if p.grad is not None]
    if not grads:
        return
    mine = torch.stack([_digest(grad) for grad in grads])
    mean = sync.mean_of(mine)
    if bool(mine.any()) and torch.allclose(mine, mean, rtol=1e-12, atol=0.0):
        warnings.warn(
            "gradients are the same on all ranks before they are exchanged. If DDP has averaged them, nothing is "
            f"saved: give the DDP model itself, thinwire.{optimizer}(ddp, ...), or ddp=",
            stacklevel=4,
        )


def _digest(parameter: Tensor) -> Tensor:
    """Return a weighted sum of the elements, which depends on their order too."""
    flat = parameter.detach().double().reshape(-1)
    return flat @ torch.arange(flat.numel(), device=flat.device).remainder(1009).add(1).double()


def check_order(policy: Policy) -> None:
    """Raise ValueError if gradients follow updates, after which momentum differs between ranks."""
    phases = [parsed(given) for _, given in policy.warmup]
    first = next((index for index, given in enumerate(phases) if given.sparse), None)
    if first is None:
        return
    if policy.auto:
        raise ValueError(
            f"{format_spec(phases[first])} before auto, which tries to send gradients first: an optimizer cannot "
            "return from updates to gradients; remove the sparse phases from the warm-up"
        )
    later = [given for given in phases[first:] if not given.sparse]
    if isinstance(policy.final, NoCompression):
        later.append(policy.final)
    if later:
        raise ValueError(
            f"{format_spec(phases[first])} before {format_spec(later[0])}: an optimizer cannot return from "
            "updates to gradients; remove the sparse phases from the warm-up, or move them to its end"
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
