"""Checks for mistakes that would stay unnoticed, before the first step or before a checkpoint is loaded."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import all_reduce_compressed
from ..compressors import NoCompression, format_spec
from ..compressors import compressor as parsed
from ..sync.policy import Policy
from ..sync.synchronizer import Synchronizer

Named = Sequence[tuple[str, Tensor]]


def check_replicas(sync: Synchronizer, named: Named) -> None:
    """Raise ValueError if parameters differ between ranks, because they would stay different unnoticed."""
    sums = torch.stack([_digest(p) for _, p in named])
    mean = sums.clone()
    all_reduce_compressed(mean, "none", op=dist.ReduceOp.AVG, group=sync.group, timeout=sync.timeout)
    apart = (sums - mean).abs() > 1e-9 * (1.0 + mean.abs())
    worst = apart.double()
    all_reduce_compressed(worst, "none", op=dist.ReduceOp.SUM, group=sync.group, timeout=sync.timeout)
    for (name, _), differs in zip(named, worst.tolist(), strict=True):
        if differs:
            raise ValueError(
                f"parameter {name!r} differs between ranks before the first step; start all ranks from the same "
                "weights (the same seed, a broadcast, or DDP, which does it)"
            )


def warn_of_averaged(sync: Synchronizer, named: Named, optimizer: str) -> None:
    """Warn if the gradients are the same on all ranks before they are exchanged.

    They are if DDP has averaged them, without thinwire's hook: then no bytes are saved.
    """
    grads = [p.grad for _, p in named if p.grad is not None]
    if not grads:
        return
    mine = torch.stack([_digest(grad) for grad in grads])
    mean = mine.clone()
    all_reduce_compressed(mean, "none", op=dist.ReduceOp.AVG, group=sync.group, timeout=sync.timeout)
    if bool(mine.any()) and torch.allclose(mine, mean, rtol=1e-12, atol=0.0):
        warnings.warn(
            "gradients are the same on all ranks before they are exchanged. If DDP has averaged them, nothing is "
            f"saved: give the DDP model itself, thinwire.{optimizer}(ddp, ...), or ddp=",
            stacklevel=5,
        )


def _digest(parameter: Tensor) -> Tensor:
    """Return a weighted sum of the elements, which depends on their order too."""
    flat = parameter.detach().double().reshape(-1)
    return flat @ torch.arange(flat.numel(), device=flat.device).remainder(1009).add(1).double()


def check_order(policy: Policy) -> None:
    """Raise ValueError if the policy sends gradients after updates.

    Once updates are sent, momentum differs between ranks, and no later step may use averaged gradients.
    """
    phases = [parsed(given) for _, given in policy.warmup]
    updates = [given.sparse for given in phases]
    if True not in updates:
        return
    first = updates.index(True)
    if policy.auto:
        raise ValueError(
            f"{format_spec(phases[first])} before auto, which tries to send gradients first: once updates are sent, "
            "gradients cannot be again; leave sparse phases out of the warm-up"
        )
    final = policy.final
    later = [given for given, update in list(zip(phases, updates, strict=True))[first:] if not update]
    if isinstance(final, NoCompression):
        later.append(final)
    if later:
        raise ValueError(
            f"{format_spec(phases[first])} before {format_spec(later[0])}: once updates are sent, gradients cannot be "
            "again; let the warm-up begin with what is not sparse, and end with what is"
        )


def check_groups(saved: list[list[str]], here: list[dict[str, Any]]) -> None:
    """Raise ValueError if the parameter groups of a checkpoint differ from those here."""
    if len(saved) != len(here):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, here there are {len(here)}")
    for number, (names, group) in enumerate(zip(saved, here, strict=True)):
        if list(names) != list(group["param_names"]):
            differs = sorted(set(names) ^ set(group["param_names"])) or ["the same in another order"]
            raise ValueError(
                f"parameter group {number} of the checkpoint holds other parameters than here: {', '.join(differs[:3])}"
            )
