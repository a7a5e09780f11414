"""Parsing of an optimizer's parameters: groups, a name for every parameter, and the DDP model if there is one."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import ParamsT

from ..integrations.ddp_models import averaged_by, ddp_of
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
