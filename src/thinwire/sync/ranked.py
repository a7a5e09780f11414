"""Per-rank states for `torch.distributed.checkpoint`, which keeps one copy of values with the same key on all ranks.

    dcp.save({"model": model.state_dict(), "optimizer": thinwire.per_rank(optimizer)}, checkpoint_id=path)
    optimizer.load_state_dict(thinwire.load_per_rank(path, "optimizer"))

Every tensor is stored under a key of its own, which contains the rank. Everything else is stored as one tensor of
bytes.
"""

import io
import re
import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ..collectives.groups import place
from .checkpoint import old_ranks

_REST = "rest"
_TENSOR = "thinwire tensor"


def per_rank(owner: Any) -> dict[str, dict[str, Tensor]]:
    """Return the state of a `Synchronizer` or thinwire optimizer in a form for `torch.distributed.checkpoint.save`."""
    sync = getattr(owner, "sync", owner)
    tensors: dict[str, Tensor] = {}
    rest = _strip(owner.state_dict(), "", tensors)
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return {f"rank{sync.rank}": {**tensors, _REST: torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)}}


def load_per_rank(path: str | PathLike[str], key: str, *, group: Any = None) -> list[dict[str, Any]]:
    """Return the states under `key` that this rank needs, for any world size of the run that saved them.

    path    the `checkpoint_id` given to `torch.distributed.checkpoint.save`.
    key     the key under which `per_rank` was saved, such as "optimizer".
    group   the group of the synchronizer; None for the default process group.
    """
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {name: match for name in saved if (match := re.match(re.escape(key) + r"\.rank(\d+)\.", name))}
    if not found:
        raise ValueError(f"nothing under {key!r} in {path} was made by thinwire.per_rank; there are {_heads(saved)}")
    world_size = 1 + max(int(match[1]) for match in found.values())
    states = []
    for old in old_ranks(*place(group), world_size):
        start = f"{key}.rank{old}."
        entries = {name: entry for name, entry in saved.items() if name.startswith(start)}
        if start + _REST not in entries:
            raise ValueError(f"the state of rank {old} of {world_size} is missing in {path}: it was not saved whole")
        room: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # each process loads alone, on purpose
            load(room, checkpoint_id=path, no_dist=True)
        tensors = {name.removeprefix(start): tensor for name, tensor in room.items()}
        rest = torch.load(io.BytesIO(bytes(tensors.pop(_REST).numpy())), weights_only=True)
        states.append(_fill(rest, tensors))
    return states


def _heads(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted({name.partition(".")[0] for name in names})) or "no entries"


def _strip(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` with a reference in place of every tensor, and add the tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        return {key: _strip(entry, f"{path}/{key}" if path else str(key), tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_strip(entry, f"{path}/{index}", tensors) for index, entry in enumerate(value))
    return value


def _fill(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _fill(entry, tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_fill(entry, tensors) for entry in value)
    return value
