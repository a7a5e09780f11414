"""The DDP models of this process, among which the one of an optimizer's parameters is found."""

import gc
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..sync.buckets import plain_name


def ddp_of(parameters: Sequence[Any]) -> DistributedDataParallel | None:
    """Return the DDP model of one of these parameters, from all objects of that class; raise ValueError if several."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    wanted = {id(parameter) for parameter in parameters}

    def found() -> list[DistributedDataParallel]:
        return [model for model in _live_models() if not wanted.isdisjoint(id(p) for _, p in averaged_by(model))]

    models = found()
    if len(models) > 1:
        gc.collect()  # one of them may be waiting for it
        models = found()
    if len(models) > 1:
        raise ValueError(
            f"the parameters belong to {len(models)} DDP models, expected one: make an optimizer for each model, or "
            "give ddp= if they share their parameters"
        )
    return models[0] if models else None


@cache
def ddp_made() -> list[int]:
    """Return, always in the same list, how many DDP models this process has made since the first call."""
    made = [0]

    def count(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        made[0] += name == "module" and isinstance(module, DistributedDataParallel)

    register_module_module_registration_hook(count)
    return made


def averaged_by(ddp: DistributedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the (name, parameter) pairs whose gradients a DDP model averages."""
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            yield plain_name(name), parameter


def _live_models() -> Iterator[DistributedDataParallel]:
    classes: list[type] = [DistributedDataParallel]
    for each in classes:
        classes += each.__subclasses__()
        for model in gc.get_referrers(each):
            is_model = type(model) is each and hasattr(model, "module")  # without, it was not made to the end
            if is_model and isinstance(model, DistributedDataParallel):
                yield model
