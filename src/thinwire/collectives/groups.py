"""The process groups of a call: one, or two if the network inside a node is fast."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .elastic import ElasticGroup
from .local import LocalGroup, LocalWorld
from .transport.channel import Channel, channel_of
from .transport.link import backend_of

_WITH_CHANNEL = (LocalGroup, ElasticGroup)  # groups that need none of torch
Group = dist.ProcessGroup | DeviceMesh | tuple[dist.ProcessGroup, dist.ProcessGroup] | LocalGroup | ElasticGroup | None
"""The ranks that take part; two groups or two dimensions where the network inside nodes is fast. None for all."""

_EXPECTED = "group {!r}, expected a process group, a pair of them, a DeviceMesh, a LocalGroup or None"


def channels(group: object, device: torch.device) -> list[Channel]:
    """Return the channels of a group: [between ranks], or [inside this node, between nodes]."""
    if isinstance(group, _WITH_CHANNEL):
        return [group.channel]
    return [channel_of(member, backend_of(member, device), device) for member in _groups(group)]


def as_group(group: Any) -> Any:
    """Return the process group of a mesh of one dimension; return other groups as they are."""
    return group.get_group() if isinstance(group, DeviceMesh) and group.ndim == 1 else group


def check_kind(group: object) -> None:
    """Raise ValueError if `group` has the wrong type. Whether this rank is a member is checked on first use."""
    kinds = (dist.ProcessGroup, DeviceMesh, *_WITH_CHANNEL, tuple)
    if group is not None and is_member(group) and not isinstance(group, kinds):
        raise ValueError(_EXPECTED.format(group))


def group_of_one() -> LocalGroup:
    """Return a group of this process alone; raise ValueError if its launcher has started others too."""
    started = os.environ.get("WORLD_SIZE", "1")
    if started != "1":
        raise ValueError(
            f"torch.distributed is not initialised, but WORLD_SIZE is {started}; call "
            "torch.distributed.init_process_group before the optimizer is made"
        )
    return LocalWorld(1).groups[0]


def is_ready(group: object) -> bool:
    """Return whether the ranks of a group are known, as after torch.distributed was initialised."""
    return isinstance(group, _WITH_CHANNEL) or (dist.is_initialized() and is_member(group))


def is_member(group: object) -> bool:
    """Return whether this is a group, and not torch's mark for a rank outside of it."""
    return group is not dist.GroupMember.NON_GROUP_MEMBER


def place(group: object) -> tuple[int, int]:
    """Return (rank, world size) over all ranks of `group`. With two groups, ranks are numbered node by node."""
    if isinstance(group, _WITH_CHANNEL):
        return group.rank, group.size
    rank, size = 0, 1
    for member in reversed(_groups(group)):
        rank, size = rank * dist.get_world_size(member) + dist.get_rank(member), size * dist.get_world_size(member)
    return rank, size


def compressing_ranks(group: object) -> int:
    """Return the number of compressed payloads in a sum: one for each rank, or with two groups one for each node."""
    return group.size if isinstance(group, _WITH_CHANNEL) else dist.get_world_size(_groups(group)[-1])


def _groups(group: object) -> list[dist.ProcessGroup]:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else as_group(group)
    if isinstance(group, DeviceMesh):
        if group.ndim != 2:
            raise ValueError(f"a mesh of {group.ndim} dimensions, expected one, or two: (nodes, ranks of a node)")
        group = group.get_group(1), group.get_group(0)
    if isinstance(group, tuple):
        if len(group) != 2:
            raise ValueError(f"a tuple of {len(group)} groups, expected two: (inside a node, between nodes)")
        inside, between = map(_member, group)
        shared = set(dist.get_process_group_ranks(inside)) & set(dist.get_process_group_ranks(between))
        if shared != {dist.get_rank()}:
            raise ValueError(
                f"the two groups share the ranks {sorted(shared)}, expected this rank, {dist.get_rank()}, alone: "
                "(ranks of this node, my peers in the other nodes)"
            )
        return [inside, between]
    if is_member(group) and not isinstance(group, dist.ProcessGroup):
        raise ValueError(_EXPECTED.format(group))
    return [_member(group)]


def _member(group: object) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only its members may call")
    return group
