"""Checks of the states of torch's optimizers in checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch

from thinwire.sync.checkpoint import DamagedError, reading

_NEEDED = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "SGD": {"step", "momentum_buffer"}}
"""What torch's optimizers keep for a parameter."""


def check_saved(saved: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise DamagedError if torch's AdamW or SGD cannot have saved this; torch itself would fail in the next step."""
    needed = _NEEDED[type(optimizer).__name__]
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
