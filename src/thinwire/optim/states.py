"""States of optimizers: what is saved, and how states of thinwire's and torch's optimizers are read.

Reading checks everything, and changes nothing: `Loaded` has what an optimizer then takes over.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.layout import residual_dtype
from ..sync import checkpoint
from ..sync.buckets import shaped
from ..sync.shards import local_of
from .families import Parameters
from .guard import check_groups, check_numbers, check_torch_options
from .rule import Rule

State = Mapping[str, Any]


class Loaded(NamedTuple):
    """A state that was read: parameter groups, moments by kind and name, and steps."""

    groups: list[dict[str, Any]]
    moments: dict[str, Mapping[str, Tensor]]
    steps: int
    take: Sequence[Callable[[], None]]  # let each rule take over what it keeps besides


# thinwire's own.


def kept_by_torch(parameters: Parameters) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state of each parameter as torch's optimizers have it: views in the shapes of the parameters."""
    kept = {name: parameters.moments_of(name) for name in parameters.given}
    return {parameters.given[name]: _as_torch(parameters, name, own) for name, own in kept.items() if own}


def _as_torch(parameters: Parameters, name: str, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    like, steps = parameters.tensors[name], torch.tensor(float(parameters.families.of(name).steps))
    return {"step": steps, **{kind: shaped(moment, like) for kind, moment in moments.items()}}


def own_state(parameters: Parameters, rules: Iterable[Rule], optimizer: str) -> dict[str, Any]:
    """Return the state under "thinwire": those of the synchronizer and of the rules, and whose moments are local."""
    sync = parameters.sync
    last = parameters.sent_as_updates(sync.steps - 1) if sync.steps else []
    after = set(parameters.sent_as_updates(sync.steps))
    count = max(family.steps for family in parameters.families.all)
    made = {"optimizer": optimizer, "count": count, "local": [name for name in last if name in after]}
    for rule in rules:
        made |= rule.state_dict()
    return {**sync.state_dict(), **made}


def states_of(given: checkpoint.States, optimizer: str) -> list[State]:
    """Return the states of ranks in a checkpoint; raise ValueError if they are none of a thinwire optimizer."""
    states = checkpoint.as_list(given)
    for state in states:
        if not isinstance(state, Mapping) or "thinwire" not in state or "param_groups" not in state:
            raise ValueError(f"not a state of thinwire.{optimizer}: it has no key 'thinwire'")
    return states


def check_kind(state: State, optimizer: str) -> None:
    """Raise ValueError if a state under "thinwire" is that of another optimizer."""
    if (found := state.get("optimizer")) != optimizer:
        raise ValueError(f"a state of thinwire.{found}, expected thinwire.{optimizer}")


def read(
    states: Sequence[State], choice: checkpoint.Choice, parameters: Parameters, rules: Sequence[Rule], optimizer: str
) -> Loaded:
    """Read the states that this rank has chosen; raise ValueError if they do not fit. `rules` by parameter group."""
    by_rank = {int(state["thinwire"]["rank"]): state for state in states}
    check_kind(choice.alike, optimizer)
    alike = by_rank[int(choice.alike["rank"])]
    taken = [by_rank[int(state["rank"])] for state in choice.taken]
    if not isinstance(apart := choice.alike.get("local"), list):
        raise checkpoint.DamagedError("'local' is no list in a saved state: the checkpoint is damaged")
    moments: dict[str, Mapping[str, Tensor]] = {}
    with checkpoint.reading():
        check_groups(alike["param_groups"], parameters.groups)
        try:
            for rule, group in zip(rules, alike["param_groups"], strict=True):
                rule.check(group)
                check_numbers(group, "reference_lr")
                if not group["reference_lr"]:
                    raise ValueError("reference_lr 0, expected a number above 0")
            count = int(alike["thinwire"]["count"])
            take = [rule.parsed(alike["thinwire"]) for rule in dict.fromkeys(rules)]
        except checkpoint.DamagedError:
            raise
        except ValueError as error:
            raise checkpoint.DamagedError(f"{error}, in a saved state: the checkpoint is damaged") from error
        for kind in parameters.vectors:
            vectors = _moments_in(alike, kind, parameters)
            if any(kind in rule.local_moments for rule in rules):
                local = checkpoint.merge(choice, [_moments_in(state, kind, parameters) for state in taken])
                for name in apart:  # a frozen parameter has none
                    if name in local:
                        vectors[name] = local[name]
                    elif name in vectors:
                        vectors[name] = torch.zeros_like(vectors[name])
            moments[kind] = vectors
    return Loaded(alike["param_groups"], moments, count, take)


def _moments_in(state: State, kind: str, parameters: Parameters) -> dict[str, Tensor]:
    """Return a moment in a saved state by name: flat, on the parameter's device and in the order of its memory."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    made = {}
    for number, (name, parameter) in zip(numbers, parameters.tensors.items(), strict=True):
        kept = state["state"].get(number, {}).get(kind)
        if kept is not None:
            kept = local_of(kept)
            if not isinstance(kept, Tensor) or kept.shape != parameter.shape:
                found = list(kept.shape) if isinstance(kept, Tensor) else type(kept).__name__
                raise ValueError(
                    f"{kind} of parameter {name!r} is {found} in the state, expected {list(parameter.shape)}: it "
                    "belongs to another model, or its parameters came in another order"
                )
            wide = residual_dtype(parameter.dtype)
            made[name] = torch.empty(parameter.numel(), dtype=wide, device=parameter.device)
            shaped(made[name], parameter).copy_(kept)
    return made


# torch's.


def is_from_torch(state: State) -> bool:
    """Return whether this is a state of an optimizer, but not one of thinwire's."""
    groups = state.get("param_groups")
    return isinstance(state.get("state"), Mapping) and isinstance(groups, list) and "thinwire" not in state


def for_torch(parameters: Parameters, rules: Sequence[Rule], optimizer: str) -> dict[str, Any]:
    """Return a state for torch's optimizer of the same name, the same on all ranks. All ranks call this."""
    _check_twin(rules, optimizer)
    sync = parameters.sync
    apart = set(parameters.sent_as_updates(sync.steps))
    state: dict[int, dict[str, Tensor]] = {}
    for number, name in enumerate(parameters.given):
        own = parameters.moments_of(name)
        if not own:
            continue
        moments = {kind: sync.mean_of(m) if name in apart else m.clone() for kind, m in own.items()}
        if name in apart:
            rules[parameters.families.of(name).group].to_torch(name, moments)
        state[number] = _as_torch(parameters, name, moments)
        if sync.shards is not None:
            state[number] |= {kind: sync.shards.distributed(name, state[number][kind]) for kind in moments}
    # All settings that torch's optimizer has in this version of torch.
    defaults = getattr(torch.optim, optimizer)([torch.zeros(1)]).defaults
    groups, first = [], 0
    for rule, group in zip(rules, parameters.groups, strict=True):
        settings = {name: group[name] for name in (*rule.settings, "initial_lr") if name in group}
        groups.append({**defaults, **settings, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return {"state": state, "param_groups": groups}


def _check_twin(rules: Iterable[Rule], optimizer: str) -> None:
    if not all(rule.settings for rule in rules):
        raise ValueError(f"torch has no optimizer like thinwire.{optimizer}, whose states could be exchanged with it")


def read_from_torch(state: State, parameters: Parameters, rules: Sequence[Rule], optimizer: str) -> Loaded:
    """Read a state of torch's optimizer, in which each parameter has taken a number of steps."""
    groups = _groups_from_torch(state, parameters.groups, rules, optimizer)
    moments = {kind: _moments_in(state, kind, parameters) for kind in parameters.vectors}
    numbers = [number for group in groups for number in group["params"]]
    kept = {name: state["state"].get(number, {}) for name, number in zip(parameters.given, numbers, strict=True)}
    steps = {name: int(found["step"]) for name, found in kept.items() if "step" in found}
    take = [partial(rule.begin_from_torch, steps) for rule in dict.fromkeys(rules)]
    return Loaded(groups, {**moments}, max(steps.values(), default=0), take)


def _groups_from_torch(
    state: State, here: list[dict[str, Any]], rules: Sequence[Rule], optimizer: str
) -> list[dict[str, Any]]:
    """Return parameter groups with the settings of a torch state, and thinwire's own; raise ValueError for others."""
    _check_twin(rules, optimizer)
    saved = state["param_groups"]
    of_kind = {rule.settings[0] for rule in rules}
    is_other = any(not isinstance(group, Mapping) or not of_kind <= group.keys() for group in saved)
    kinds = {kind for rule in rules for kind in rule.moments}
    known = {"step", *kinds, *(f"max_{kind}" for kind in kinds)}
    kept = {name for moments in state["state"].values() for name in moments}
    if is_other or kept - known:  # Adamax, NAdam and RMSprop have the same settings, and others besides
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
    for rule, theirs, ours in zip(rules, saved, here, strict=True):
        check_torch_options({name: theirs.get(name) for name in ("amsgrad", "dampening", "maximize")})
        settings = {name: theirs[name] for name in (*rule.settings, "initial_lr") if name in theirs}
        if theirs.get("decoupled_weight_decay") is False and theirs["weight_decay"]:
            del settings["weight_decay"]
            warnings.warn(
                f"the weight decay of torch.optim.Adam, {theirs['weight_decay']}, is part of its gradient, and is not "
                f"taken; that of thinwire.{optimizer} stays {ours['weight_decay']}",
                stacklevel=4,
            )
        made.append({**ours, **settings, "params": theirs["params"]})
    return made


# Those of torch's own optimizers: of dense training, and inside LocalSteps.

_NEEDED = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"}, torch.optim.SGD: {"step", "momentum_buffer"}}
"""What torch's optimizers keep for a parameter."""


def check_saved(saved: Any, optimizer: torch.optim.Optimizer, *, settings: bool = True) -> None:
    """Raise DamagedError if torch's AdamW or SGD cannot have saved this; torch itself would fail in the next step.

    settings   whether those of the groups must be the optimizer's, but for lr and weight decay.
    """
    if type(optimizer) not in _NEEDED:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with checkpoint.reading():
        groups, states = saved["param_groups"], saved["state"]
        numbers = [number for group in groups for number in group["params"]]
        theirs, ours = ([_settings(group) for group in each] for each in (groups, optimizer.param_groups))
        if numbers != list(range(len(parameters))) or (settings and theirs != ours):
            raise checkpoint.DamagedError(
                "torch's optimizer has other settings in a checkpoint: the checkpoint is damaged"
            )
        for number, moments in states.items():
            for name, value in moments.items():
                shape = torch.Size() if name == "step" else parameters[number].shape
                is_tensor = isinstance(value, Tensor) and value.is_floating_point() and value.shape == shape
                if not is_tensor or (name == "step" and not value >= 0):
                    raise checkpoint.DamagedError(
                        f"{name} of parameter {number} has another form: the checkpoint is damaged"
                    )
            if not _NEEDED[type(optimizer)] <= {"step", *moments.keys()}:
                raise checkpoint.DamagedError(f"a moment of parameter {number} is missing: the checkpoint is damaged")


def _settings(group: State) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "lr", "weight_decay")}
