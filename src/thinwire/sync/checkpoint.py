"""Checkpoints of per-rank state, and how training resumes with another world size.

With P ranks, a rank's residual contributes residual / P to the average over ranks. When training resumes with Q ranks,
rank r adds up the residuals of the old ranks r, r + Q, r + 2Q ... and multiplies the sum by Q / P. So the sum of all
residuals divided by the number of ranks stays the same. Local momentum is shared in the same way, because its average
counts too.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .residuals import Residuals

FORMAT = 3
State = Mapping[str, Any]
States = State | Sequence[State]
_RANKS = "ranks"  # the key of the states of all ranks, in the state of one
_TYPES: dict[str, type | tuple[type, ...]] = {
    "rank": int, "world_size": int, "steps": int, "scale": (int, float), "options": Mapping, "entries": Mapping,
    "layout": list, "residuals": Mapping, "owners": list,
}  # fmt: skip
_KEYS = {"format", "policy", *_TYPES}
_LARGEST = 2**63  # steps are sent as integers of 64 bits


class DamagedError(ValueError):
    """A state that thinwire cannot have saved."""


@contextmanager
def reading() -> Iterator[None]:
    """Raise DamagedError in place of the error that a value of another type causes in the `with` block."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise DamagedError(f"{type(error).__name__} in a saved state, {error}: the checkpoint is damaged") from error


def consolidated(states: Sequence[State], rank: int) -> dict[str, Any]:
    """Return the state of one rank, with those of all ranks inside; of an optimizer, without its groups twice."""
    own = states[rank]
    if "thinwire" not in own:
        return {**own, _RANKS: list(states)}
    ranks = [{key: state[key] for key in ("state", "thinwire")} for state in states]
    return {**own, "thinwire": {**own["thinwire"], _RANKS: ranks}}


def own_state(state: State) -> State:
    """Return a state without those of all ranks inside."""
    if "thinwire" in state:
        return {**state, "thinwire": own_state(state["thinwire"])}
    return {key: value for key, value in state.items() if key != _RANKS}


def as_list(given: States) -> list[State]:
    """Return one state, or the states of several ranks, as a list; raise ValueError for another type."""
    if isinstance(given, Mapping):
        ours = given.get("thinwire", given)
        ranks = ours.get(_RANKS) if isinstance(ours, Mapping) else None
        if ranks is None:
            return [given]
        if not isinstance(ranks, list) or not all(isinstance(state, Mapping) for state in ranks):
            raise DamagedError(
                f"{_RANKS} of a saved state is no list of the states of ranks: the checkpoint is damaged"
            )
        return ranks if ours is given else [{**state, "param_groups": given["param_groups"]} for state in ranks]
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return list(given)
    raise ValueError(f"a state of type {type(given).__name__}, expected a dict, or a list of those of all ranks")


class Choice(NamedTuple):
    """The states of a checkpoint that this rank uses."""

    alike: State  # state for values that are the same on all ranks; this rank's own if the world size is the same
    taken: list[State]  # states of the old ranks whose residuals this rank takes over; empty if they are missing
    factor: float
    same_world: bool


def old_ranks(rank: int, world_size: int, saved_world_size: int) -> range:
    """Return the ranks of a saved run, of which there may be any number, whose states rank `rank` needs.

    The state of the first one is also used for values that are the same on all ranks.

    >>> list(old_ranks(1, 2, 4)), list(old_ranks(2, 3, 2))
    ([1, 3], [0])
    """
    if saved_world_size < 1:
        raise DamagedError(f"a world size of {saved_world_size} in a checkpoint, expected 1 or more")
    first = rank % saved_world_size
    return range(rank, saved_world_size, world_size) or range(first, first + 1)


def choose(given: States, rank: int, world_size: int, *, strict: bool = True) -> Choice:
    """Return the states that this rank needs. Raise ValueError if some are invalid, or missing while `strict`."""
    states = as_list(given)
    for state in states:
        if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
            lacks = f"without {min(_KEYS - state.keys())}" if isinstance(state, Mapping) else type(state).__name__
            raise DamagedError(f"not a state that thinwire saved ({lacks}); expected its dict, or a list of all ranks'")
        if type(state["format"]) is not int or state["format"] != FORMAT:
            raise ValueError(
                f"a checkpoint of format {state['format']!r:.40}, expected {FORMAT}: go on with the version of "
                "thinwire that wrote it, or load the weights alone and begin with a new optimizer"
            )
        _check_types(state)
    if not states:
        raise ValueError("no state was given, expected one for each rank of the saved run")
    for key in ("world_size", "steps", "policy"):
        if any(state[key] != states[0][key] for state in states):
            listed = ", ".join(f"rank {state['rank']}: {state[key]}" for state in states)
            raise ValueError(f"states that do not belong together: {key} differs ({listed})")
    saved_size = int(states[0]["world_size"])
    by_rank = {int(state["rank"]): state for state in states}
    needed = old_ranks(rank, world_size, saved_size)
    missing = list(islice((old for old in needed if old not in by_rank), 8))
    if missing and strict:
        have = ", ".join(map(str, sorted(by_rank)))
        raise ValueError(
            f"rank {rank} of {world_size} needs the state of rank {missing[0]} of the {saved_size} that were saved, "
            f"and was given that of {have}. Residuals and momentum differ between ranks: call consolidate_state_dict() "
            "on all ranks before rank 0 saves its state_dict(), or save the state_dict() of every rank and give "
            "load_state_dict a list of all. To go on without what is missing, give load_state_dict strict=False"
        )
    if missing:
        warnings.warn(
            f"no state of rank {', '.join(map(str, missing))} of the {saved_size} that were saved: what was not sent, "
            "and the share of the momentum, are lost",
            stacklevel=3,
        )
    taken = [by_rank[old] for old in needed if old < saved_size and old % world_size == rank and old in by_rank]
    return Choice(
        alike=by_rank.get(needed[0], states[0]),
        taken=taken,
        factor=world_size / saved_size,
        same_world=world_size == saved_size,
    )


def _check_types(state: State) -> None:
    for name, kind in _TYPES.items():
        value = state[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise DamagedError(f"{name} is of type {type(value).__name__} in a saved state: the checkpoint is damaged")
    if not 0 <= state["rank"] < state["world_size"] or not 0 <= state["steps"] < _LARGEST:
        raise DamagedError(
            f"rank {state['rank']} of {state['world_size']} with {state['steps']} steps in a saved state: the "
            "checkpoint is damaged"
        )
    if not 0 < state["scale"] < math.inf:
        raise DamagedError(f"a scale of the loss of {state['scale']} in a saved state: the checkpoint is damaged")
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in state["layout"]):
        raise DamagedError("layout is no list of lists of names in a saved state: the checkpoint is damaged")


def merge(choice: Choice, vectors: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Return the vectors of this rank, merged from those of the states that it takes over; its own are not copied."""
    if choice.same_world:
        return vectors[0] if vectors else {}
    names = {name: tensor for named in vectors for name, tensor in named.items()}
    return {
        name: choice.factor * sum((named[name].view(-1) for named in vectors if name in named), torch.zeros(()))
        for name in names
    }


def residuals_of(state: State) -> dict[str, Tensor]:
    """Return all residuals of a rank, including those of the shards that it owns."""
    made = Residuals()
    made.load(state["residuals"], state["owners"])
    made.fold()
    return made.named()


def check_same(name: str, saved: object, here: object) -> None:
    """Raise ValueError with the first difference between a setting of the checkpoint and that of this run."""
    if saved == here:
        return
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key in [*saved, *here]:
            check_same(f"{name} {key}", saved.get(key), here.get(key))
    raise ValueError(
        f"the checkpoint was made with {name} {saved!r}, here it is {here!r}; use the same, or start without the "
        "checkpoint's residuals"
    )


def check_shards(states: Sequence[State], here: list[int] | None) -> None:
    """Raise ValueError if states are of another shard (number, of how many) than that here; None is no shard."""
    for state in states:
        found = state.get("shard")
        if (None if found is None else list(found)) != here:
            listed = ["no shard" if one is None else f"shard {one[0]} of {one[1]}" for one in (found, here)]
            raise ValueError(
                f"a state of {listed[0]}, here it is {listed[1]}: save with torch.distributed.checkpoint and "
                "thinwire.per_rank(optimizer), and load with thinwire.load_per_rank(..., owner=optimizer)"
            )


def check_lengths(state: State) -> None:
    """Raise ValueError if a residual in a state does not have the size of its parameter."""
    for name, residual in state["residuals"].items():
        if not isinstance(residual, Tensor) or residual.numel() != state["entries"].get(name):
            raise DamagedError(
                f"the residual of {name!r} in the checkpoint of rank {state['rank']} does not have the "
                f"{state['entries'].get(name, 'no')} elements of its parameter: the checkpoint is damaged"
            )
    for owner in state["owners"]:
        for name, size in owner["run"]:
            if name is not None and state["residuals"][name].numel() != size:
                raise DamagedError(
                    f"a slice with {size!r} elements of {name!r} in the checkpoint of rank {state['rank']}, which has "
                    f"{state['residuals'][name].numel()}: the checkpoint is damaged"
                )


def check_model(saved: Mapping[str, int], here: Mapping[str, int] | None) -> None:
    """Raise ValueError if a checkpoint belongs to another model."""
    if here is None or not saved or dict(saved) == dict(here):
        return
    for name in [*saved, *here]:
        if saved.get(name) != here.get(name):
            raise ValueError(
                f"the checkpoint is of another model: parameter {name!r} has {saved.get(name, 'no')} elements "
                f"there and {here.get(name, 'no')} here"
            )
