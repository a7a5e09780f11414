"""Parsing of an optimizer's parameters: groups, a name for every parameter, and the DDP model if there is one."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Found(NamedTuple):
    """The parameter groups and the DDP model of an optimizer."""

    groups: list[dict[str, Any]]
    """Parameter groups as torch's optimizers take them, with (name, parameter) pairs."""
    ddp: DistributedDataParallel | None


def find(given: Any, ddp: DistributedDataParallel | None) -> Found:
    """Return the parameter groups, with a name for every parameter, and the DDP model.

    given   a DDP model, another module, parameters, (name, parameter) pairs, or dicts of them with options.
    ddp     the DDP model of the parameters, if they are not given as a DDP model.
    """
    if ddp is not None and not isinstance(ddp, DistributedDataParallel):
        raise ValueError(f"ddp {ddp!r}, expected the DistributedDataParallel that the parameters belong to, or None")
    if isinstance(given, DistributedDataParallel):
        if ddp is not None and ddp is not given:
            raise ValueError("two DDP models, expected one")
        ddp, given = given, given.module.named_parameters()
    elif isinstance(given, nn.Module):
        inside = [module for module in given.modules() if isinstance(module, DistributedDataParallel)]
        if inside and getattr(given, "_orig_mod", None) is not inside[0]:  # as torch.compile wraps it
            raise ValueError(f"a {type(given).__name__} with a DDP model inside; give the DDP model itself")
        ddp = inside[0] if inside else ddp
        given = (inside[0].module if inside else given).named_parameters()
    elif isinstance(given, Tensor):
        raise ValueError("a single tensor, expected a module or an iterable of parameters")
    entries = list(given)
    groups = entries if any(isinstance(entry, dict) for entry in entries) else [{"params": entries}]
    for group in groups:
        if not isinstance(group, dict) or "params" not in group:
            raise ValueError(f"a {type(group).__name__} among the groups, expected dicts with 'params'")
    known = {} if ddp is None else {id(p): name for name, p in ddp.module.named_parameters()}
    named = [
        {**group, "params": [_named(entry, f"{number}.{index}", known) for index, entry in enumerate(_listed(group))]}
        for number, group in enumerate(groups)
    ]
    _check(named, ddp, known)
    return Found(named, ddp)


def _listed(group: dict[str, Any]) -> Iterable[Any]:
    params = group["params"]
    return [params] if isinstance(params, Tensor) else list(params)


def _named(entry: Any, number: str, known: dict[int, str]) -> tuple[str, Any]:
    name, parameter = entry if isinstance(entry, tuple) else (number, entry)
    if not isinstance(parameter, Tensor):
        raise ValueError(f"a {type(parameter).__name__} among the parameters, expected tensors or (name, tensor) pairs")
    if known and id(parameter) not in known:
        raise ValueError(f"parameter {name!r} does not belong to the DDP model")
    return known.get(id(parameter), str(name)), parameter


def _check(groups: list[dict[str, Any]], ddp: DistributedDataParallel | None, known: dict[int, str]) -> None:
    pairs = [pair for group in groups for pair in group["params"]]
    if not any(parameter.requires_grad for _, parameter in pairs):
        raise ValueError("no parameter that requires a gradient was given")
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ValueError(f"parameter {twice!r} was given twice")
    if ddp is not None:
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        unknown = next((name for name, p in pairs if name in ignored and p.requires_grad), None)
        if unknown is not None:
            raise ValueError(f"parameter {unknown!r} is one that DDP was told to ignore: step it by another optimizer")
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad and name not in ignored and name not in set(names):
                raise ValueError(
                    f"parameter {name!r} of the DDP model is in no group: what is exchanged would be no gradient; "
                    "give the optimizer all parameters, or set requires_grad=False"
                )
