"""Checkpoints of per-rank state, and how training resumes with another world size.

With P ranks, a rank's residual contributes residual / P to the average over ranks. When training resumes with Q ranks,
rank r adds up the residuals of the old ranks r, r + Q, r + 2Q ... and multiplies the sum by Q / P. So the sum of all
residuals divided by the number of ranks stays the same. Local momentum is shared in the same way, because its average
counts too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .owners import Owners
from .residuals import NamedVectors

FORMAT = 2
"""Version of the checkpoint format.

Format 1 had second moments in the unit of a rank's own gradient, without their scale, and no residuals of small
tensors.
"""

State = Mapping[str, Any]


_KEYS = {
    "format",
    "rank",
    "world_size",
    "policy",
    "options",
    "steps",
    "scale",
    "entries",
    "layout",
    "residuals",
    "owners",
    "shared",
}


def as_list(given: State | Sequence[State]) -> list[State]:
    """Return one state, or the states of several ranks, as a list; raise ValueError for another type."""
    if isinstance(given, Mapping):
        return [given]
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return list(given)
    raise ValueError(f"a state of type {type(given).__name__}, expected a dict, or a list of those of all ranks")


class Choice(NamedTuple):
    """The states of a checkpoint that this rank uses."""

    alike: State
    """State for values that are the same on all ranks; this rank's own if the world size is the same."""
    taken: list[State]
    """States of the old ranks whose residuals this rank takes over."""
    factor: float
    same_world: bool


def old_ranks(rank: int, world_size: int, saved_world_size: int) -> list[int]:
    """Return the ranks of a saved run whose states rank `rank` of `world_size` needs.

    The state of the first one is also used for values that are the same on all ranks.

    >>> old_ranks(1, 2, 4), old_ranks(2, 3, 2)
    ([1, 3], [0])
    """
    return list(range(rank, saved_world_size, world_size)) or [rank % saved_world_size]


def choose(given: State | Sequence[State], rank: int, world_size: int) -> Choice:
    """Return the states that this rank needs; raise ValueError if some are missing, invalid or inconsistent."""
    states = as_list(given)
    for state in states:
        if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
            lacks = f"without {min(_KEYS - state.keys())}" if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"not a state that thinwire saved ({lacks}); expected its dict, or a list of all ranks'")
        if state["format"] != FORMAT:
            raise ValueError(
                f"a checkpoint of format {state['format']}, expected {FORMAT}: it was written by another version of "
                "thinwire, whose moments and residuals mean something else; go on with that version, or load the "
                "weights alone and begin with a new optimizer"
            )
    if not states:
        raise ValueError("no state was given, expected one for each rank of the saved run")
    for key in ("world_size", "steps", "policy"):
        if any(state[key] != states[0][key] for state in states):
            told = ", ".join(f"rank {state['rank']}: {state[key]}" for state in states)
            raise ValueError(f"states that do not belong together: {key} differs ({told})")
    saved_size = int(states[0]["world_size"])
    by_rank = {int(state["rank"]): state for state in states}
    needed = old_ranks(rank, world_size, saved_size)
    missing = [old for old in needed if old not in by_rank]
    if missing:
        have = ", ".join(map(str, sorted(by_rank)))
        raise ValueError(
            f"rank {rank} of {world_size} needs the state of rank {missing[0]} of the {saved_size} that were saved, "
            f"and was given that of {have}; give it a list of the states of all ranks"
        )
    taken = [by_rank[old] for old in needed if old < saved_size and old % world_size == rank]
    return Choice(by_rank[needed[0]], taken, world_size / saved_size, world_size == saved_size)


def merge(choice: Choice, vectors: Sequence[Mapping[str, Tensor]]) -> NamedVectors:
    """Return the vectors of this rank, merged from those of the states that it takes over."""
    made = NamedVectors()
    if choice.same_world:
        made.load(vectors[0])
        return made
    names = {name: tensor for named in vectors for name, tensor in named.items()}
    made.load(
        {
            name: choice.factor * sum((named[name].view(-1) for named in vectors if name in named), torch.zeros(()))
            for name in names
        }
    )
    return made


def residuals_of(state: State) -> dict[str, Tensor]:
    """Return all residuals of a rank, including those of the shards that it owns."""
    made, owners = NamedVectors(), Owners()
    made.load(state["residuals"])
    owners.load_state_dict(state["owners"])
    owners.fold(made)
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


def check_lengths(state: State) -> None:
    """Raise ValueError if a residual in a state does not have the size of its parameter."""
    for name, residual in state["residuals"].items():
        if not isinstance(residual, Tensor) or residual.numel() != state["entries"].get(name):
            raise ValueError(
                f"the residual of {name!r} in the checkpoint of rank {state['rank']} does not have the "
                f"{state['entries'].get(name, 'no')} elements of its parameter: the checkpoint is damaged"
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
