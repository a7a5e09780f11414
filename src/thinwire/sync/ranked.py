"""Per-rank states for `torch.distributed.checkpoint`, which keeps one copy of values with the same key on all ranks.

    dcp.save({"model": model.state_dict(), "optimizer": thinwire.per_rank(optimizer)}, checkpoint_id=path)
    optimizer.load_state_dict(thinwire.load_per_rank(path, "optimizer"))

Every tensor is stored under a key that contains the rank, and everything else as one tensor of bytes. Of a sharded
model, each replica stores tensors over all of its shards, as DTensors, under keys that contain the number of the
replica. So torch can cut them for another number of shards, which `load_per_rank(..., owner=optimizer)` does.
"""

import io
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..collectives.groups import Group, place
from .buckets import flat, shaped
from .checkpoint import DamagedError, check_model, old_ranks, own_state
from .shards import ShardGroup, is_sharded, local_of

if TYPE_CHECKING:  # torch.distributed.checkpoint takes a second to load: only those who load a checkpoint wait for it
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.stateful import Stateful

_REST = "rest"
_TENSOR = "thinwire tensor"


def per_rank(owner: "Stateful") -> dict[str, dict[str, Tensor]]:
    """Return the state of a `Synchronizer` or thinwire optimizer in a form for `torch.distributed.checkpoint.save`.

    Of a sharded model, residuals of owners are added to the ranks' own here, because they cannot be cut otherwise.
    """
    sync: Any = getattr(owner, "sync", owner)
    shards: ShardGroup | None = sync.shards
    if shards is not None:
        sync.unsent.fold()
    state = own_state(owner.state_dict())
    tensors: dict[str, Tensor] = {}
    rest = strip(state, "", tensors)
    if shards is not None:
        rest.get("thinwire", rest)["entries"] = dict(shards.numels)
        names = _names(state)
        for path, tensor in tensors.items():
            if (name := _parameter_at(path, names)) is not None:
                tensors[path] = shards.distributed(name, shaped(flat(tensor.detach()), shards.shard(name)))
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    tensors[_REST] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    if shards is None:
        return {f"rank{sync.rank}": tensors}
    if shards.rank > 0:  # what all shards have alike is saved by the first
        tensors = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
    return {f"replica{sync.rank}": tensors}


def load_per_rank(
    path: str | PathLike[str], key: str, *, group: Group = None, owner: Any = None
) -> list[dict[str, Any]]:
    """Return the states under `key` that this rank needs, for any world size of the run that saved them.

    path    the `checkpoint_id` given to `torch.distributed.checkpoint.save`.
    key     the key under which `per_rank` was saved, such as "optimizer".
    group   the group of the synchronizer; None for the default process group.
    owner   the optimizer or synchronizer that loads them, in place of `group`; a sharded model needs it.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    sync = getattr(owner, "sync", owner)
    shards: ShardGroup | None = None if sync is None else sync.shards
    group = group if sync is None else sync.group
    try:
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        raise DamagedError(f"{path} has no metadata of torch.distributed.checkpoint: {_line(error)}") from None
    pattern = re.escape(key) + r"\.(rank|replica)(\d+)\."
    found = {name: match for name in saved if (match := re.match(pattern, name))}
    if not found:
        keys = ", ".join(sorted({name.partition(".")[0] for name in saved})) or "no keys"
        raise ValueError(f"nothing under {key!r} in {path} was made by thinwire.per_rank; there are {keys}")
    kind = next(iter(found.values()))[1]
    if shards is not None and kind == "rank":
        raise ValueError(
            f"{path} is of a model that was not sharded, here it is: load the weights, and begin with a new optimizer"
        )
    world_size = 1 + max(int(match[2]) for match in found.values())
    there = sum(file.stat().st_size for file in Path(path).iterdir() if file.is_file())
    states = []
    for old in old_ranks(*place(group), world_size):
        start = f"{key}.{kind}{old}."
        entries = {
            name.removeprefix(start): entry
            for name, entry in saved.items()
            if name.startswith(start) and isinstance(entry, TensorStorageMetadata)
        }
        if _REST not in entries:
            raise ValueError(f"the state of {kind} {old} of {world_size} is missing in {path}: it was not saved whole")
        wanted = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in entries.values())
        if wanted > there:  # before memory is allocated for them
            raise DamagedError(f"{path} lists {wanted:,} bytes of rank {old}, but its files have {there:,}")
        try:
            rest = _load(path, start, {_REST: _empty(entries.pop(_REST))})[_REST]
            state = torch.load(io.BytesIO(bytes(rest.numpy())), weights_only=True)
            names = _names(state)
            room = {at: _room(at, entry, names, shards) for at, entry in entries.items()}
            states.append(fill(state, _load(path, start, room)))
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
            raise DamagedError(f"the state of {kind} {old} in {path} cannot be read: {_line(error)}") from None
        if kind == "replica":
            _fit(states[-1], shards)
    return states


def _load(path: str | PathLike[str], start: str, room: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what is saved under keys that begin with `start`, by the rest of the key; this rank's part of DTensors."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # each process loads alone, on purpose
        load({start + name: tensor for name, tensor in room.items()}, checkpoint_id=path, no_dist=True)
    return {name: local_of(tensor) for name, tensor in room.items()}


def _empty(entry: "TensorStorageMetadata") -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


# Sharded models.


def _names(state: Mapping[str, Any]) -> list[str]:
    return [name for group in state.get("param_groups", ()) for name in group["param_names"]]


def _parameter_at(path: str, names: Sequence[str]) -> str | None:
    """Return the parameter whose residual or moment lies at a path of a state; None for other tensors."""
    match = re.fullmatch(r"(?:thinwire/)?residuals/(.+)|state/(\d+)/(?!step$).+", path)
    if match is None:
        return None
    return match[1] or names[int(match[2])]


def _room(path: str, entry: "TensorStorageMetadata", names: Sequence[str], shards: ShardGroup | None) -> Tensor:
    """Return memory for a saved tensor; for a parameter of a sharded model, for this rank's shard of it."""
    name = None if shards is None else _parameter_at(path, names)
    if shards is None or name is None:
        return _empty(entry)
    if name not in shards.parameters or entry.size != shards.parameters[name].shape:
        here = list(shards.parameters[name].shape) if name in shards.parameters else "no parameter of this name"
        raise ValueError(f"{name!r} is {list(entry.size)} in the checkpoint, here there is {here}: it is another model")
    like = shards.shard(name)
    return shards.distributed(name, torch.empty_like(like, dtype=entry.properties.dtype))


def _fit(state: dict[str, Any], shards: ShardGroup | None) -> None:
    """Make a state of a whole replica one of this rank's shard."""
    kept = state.get("thinwire", state)
    kept["residuals"] = {name: flat(tensor) for name, tensor in kept["residuals"].items()}
    kept.pop("shard", None)
    if shards is not None:
        check_model(kept["entries"], shards.numels)
        kept["entries"] = {name: shards.shard(name).numel() for name in kept["entries"]}
        kept["shard"] = shards.place


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def strip(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` with a reference in place of every tensor, and add the tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        return {key: strip(item, f"{path}/{key}" if path else str(key), tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(strip(item, f"{path}/{index}", tensors) for index, item in enumerate(value))
    return value


def fill(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return `value` with the tensors in place of the references of `strip`."""
    if isinstance(value, Mapping):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: fill(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(fill(item, tensors) for item in value)
    return value
