"""Parsing of an optimizer's parameters: groups, a name for every parameter, and the DDP model if there is one."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import ParamsT

from ..integrations.fsdp import check_module
from ..sync.buckets import plain_name

Params = nn.Module | ParamsT
"""A DDP model, another module, parameters, (name, parameter) pairs, or dicts of them with options."""


def find_parameters(
    given: Params, ddp: DistributedDataParallel | None
) -> tuple[list[dict[str, Any]], DistributedDataParallel | None]:
    """Return the groups with (name, parameter) pairs, as torch takes them, and the DDP model, given or found."""
    if ddp is not None and not isinstance(ddp, DistributedDataParallel):
        raise ValueError(f"ddp {ddp!r}, expected the DistributedDataParallel that the parameters belong to, or None")
    params: Iterable[Any]
    if isinstance(given, DistributedDataParallel):
        if ddp is not None and ddp is not given:
            raise ValueError("two DDP models, expected one")
        ddp, params = given, given.module.named_parameters()
    elif isinstance(given, nn.Module):
        inside = [module for module in given.modules() if isinstance(module, DistributedDataParallel)]
        if inside and getattr(given, "_orig_mod", None) is not inside[0]:  # as torch.compile wraps it
            raise ValueError(f"a {type(given).__name__} with a DDP model inside; give the DDP model itself")
        check_module(given)
        ddp = inside[0] if inside else ddp
        params = (inside[0].module if inside else given).named_parameters()
    elif isinstance(given, Tensor):
        raise ValueError("a single tensor, expected a module or an iterable of parameters")
    else:
        params = given
    items: list[Any] = list(params)
    groups = items if any(isinstance(item, dict) for item in items) else [{"params": items}]
    for group in groups:
        if not isinstance(group, dict) or "params" not in group:
            raise ValueError(f"a {type(group).__name__} among the groups, expected dicts with 'params'")
    listed = [[own] if isinstance(own := group["params"], Tensor) else list(own) for group in groups]
    if ddp is None:
        ddp = ddp_of([each[-1] if isinstance(each, tuple) else each for items in listed for each in items])
    known = {} if ddp is None else {id(p): plain_name(name) for name, p in ddp.module.named_parameters()}
    named = [
        {**group, "params": [_named(item, f"{number}.{index}", known) for index, item in enumerate(items)]}
        for number, (group, items) in enumerate(zip(groups, listed, strict=True))
    ]
    _check(named, ddp, known)
    return named, ddp


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


_made = 0
_is_counting = False


def count_ddp() -> int:
    """Return how many DDP models this process has made since the first call, which costs nothing."""
    global _is_counting
    if not _is_counting:
        register_module_module_registration_hook(_count)
        _is_counting = True
    return _made


def _count(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    global _made
    if name == "module" and isinstance(module, DistributedDataParallel):
        _made += 1


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


def _named(item: Any, number: str, known: dict[int, str]) -> tuple[str, Any]:
    name, parameter = item if isinstance(item, tuple) else (number, item)
    if not isinstance(parameter, Tensor):
        raise ValueError(f"a {type(parameter).__name__} among the parameters, expected tensors or (name, tensor) pairs")
    if known and id(parameter) not in known:
        raise ValueError(
            f"parameter {name!r} does not belong to the DDP model that others belong to: give each model its optimizer"
        )
    return known.get(id(parameter), plain_name(str(name))), parameter


def _check(groups: list[dict[str, Any]], ddp: DistributedDataParallel | None, known: dict[int, str]) -> None:
    pairs = [pair for group in groups for pair in group["params"]]
    if not any(parameter.requires_grad for _, parameter in pairs):
        raise ValueError("no parameter that requires a gradient was given")
    given = Counter(name for name, _ in pairs)
    twice, count = given.most_common(1)[0]
    if count > 1:
        raise ValueError(f"parameter {twice!r} was given twice")
    if ddp is not None:
        ignored = {plain_name(name) for name in getattr(ddp, "parameters_to_ignore", ())}
        unknown = next((name for name, p in pairs if name in ignored and p.requires_grad), None)
        if unknown is not None:
            raise ValueError(f"parameter {unknown!r} is one that DDP ignores: step it by another optimizer")
        for name, _ in averaged_by(ddp):
            if name not in given:
                raise ValueError(
                    f"parameter {name!r} of the DDP model is in no group: its gradient would not be averaged; "
                    "give the optimizer all parameters, or set requires_grad=False"
                )
