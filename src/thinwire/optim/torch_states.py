"""States of torch's own optimizers: recognised, and their parameter groups converted in both directions."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..sync.checkpoint import DamagedError, reading
from .checks import check_torch_options

_SETTINGS = {
    "AdamW": ("lr", "betas", "eps", "weight_decay", "initial_lr"),
    "SGD": ("lr", "momentum", "weight_decay", "nesterov", "initial_lr"),
}
"""Settings that torch's and thinwire's optimizers share. `initial_lr` is that of schedulers."""
_KIND = {"AdamW": "betas", "SGD": "momentum"}  # by which they are distinguished
_KEPT = {"AdamW": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, "SGD": {"step", "momentum_buffer"}}
"""What torch's optimizers keep for a parameter. thinwire counts steps of SGD too, and torch's SGD keeps the count."""


def is_from_torch(state: Mapping[str, Any]) -> bool:
    """Return whether this is a state of an optimizer, but not one of thinwire's."""
    groups = state.get("param_groups")
    return isinstance(state.get("state"), Mapping) and isinstance(groups, list) and "thinwire" not in state


def check_saved(saved: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise DamagedError if torch's AdamW or SGD cannot have saved this; torch itself would fail in the next step."""
    needed = _KEPT[type(optimizer).__name__] - {"max_exp_avg_sq"}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with reading():
        groups, states = saved["param_groups"], saved["state"]
        numbers = [number for group in groups for number in group["params"]]
        theirs, ours = ([_settings(group) for group in each] for each in (groups, optimizer.param_groups))
        if numbers != list(range(len(parameters))) or theirs != ours:
            raise DamagedError("torch's optimizer has other settings in a checkpoint: the checkpoint is damaged")
        for number, moments in states.items():
            for name, value in moments.items():
                shape = torch.Size() if name == "step" else parameters[number].shape
                is_tensor = isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == shape
                if not is_tensor or (name == "step" and not value >= 0):
                    raise DamagedError(f"{name} of parameter {number} has another form: the checkpoint is damaged")
            if not needed <= {"step", *moments.keys()}:
                raise DamagedError(f"a moment of parameter {number} is missing: the checkpoint is damaged")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "lr", "weight_decay")}


def groups_from_torch(state: Mapping[str, Any], here: list[dict[str, Any]], optimizer: str) -> list[dict[str, Any]]:
    """Return parameter groups with the settings of a torch state, and thinwire's own; raise ValueError for others."""
    saved = state["param_groups"]
    is_other = any(not isinstance(group, Mapping) or _KIND[optimizer] not in group for group in saved)
    kept = {name for moments in state["state"].values() for name in moments}
    if is_other or kept - _KEPT[optimizer]:  # Adamax, NAdam and RMSprop have the same settings, and others besides
        raise ValueError(
            f"a state of another optimizer, expected that of thinwire.{optimizer} or torch.optim.{optimizer}"
        )
    sizes = [len(group["params"]) for group in saved], [len(group["params"]) for group in here]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the state of torch's optimizer has groups of {sizes[0]} parameters, here they have {sizes[1]}: give both "
            "optimizers the same groups"
        )
    made = []
    for theirs, ours in zip(saved, here, strict=True):
        check_torch_options({name: theirs.get(name) for name in ("amsgrad", "dampening", "maximize")})
        settings = {name: theirs[name] for name in _SETTINGS[optimizer] if name in theirs}
        if optimizer == "AdamW" and theirs.get("decoupled_weight_decay") is False and theirs["weight_decay"]:
            del settings["weight_decay"]
            warnings.warn(
                f"the weight decay of torch.optim.Adam, {theirs['weight_decay']}, is part of its gradient, and is not "
                f"taken; that of thinwire.AdamW stays {ours['weight_decay']}",
                stacklevel=4,
            )
        made.append({**ours, **settings, "params": theirs["params"]})
    return made


def groups_for_torch(here: list[dict[str, Any]], optimizer: str) -> list[dict[str, Any]]:
    """Return parameter groups with all settings that torch's optimizer has in this version of torch."""
    defaults = getattr(torch.optim, optimizer)([torch.zeros(1)]).defaults
    made, first = [], 0
    for group in here:
        settings = {name: group[name] for name in _SETTINGS[optimizer] if name in group}
        numbers = list(range(first, first + len(group["params"])))
        made.append({**defaults, **settings, "params": numbers})
        first += len(numbers)
    return made
