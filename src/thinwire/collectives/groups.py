"""The process groups of a call: one, or two if the network inside a node is fast."""

import torch
import torch.distributed as dist

from .local import LocalGroup
from .transport.channel import Channel, channel_of
from .transport.link import backend_of

_EXPECTED = "group {!r}, expected a process group, a pair of them, a DeviceMesh, a LocalGroup or None"


def channels(group: object, device: torch.device) -> list[Channel]:
    """Return the channels of a group: [between ranks], or [inside this node, between nodes]."""
    if isinstance(group, LocalGroup):
        return [group.channel]
    return [channel_of(member, backend_of(member, device), device) for member in _groups(group)]


def check_kind(group: object) -> None:
    """Raise ValueError if `group` has the wrong type. Whether this rank is a member is checked on first use."""
    from torch.distributed.device_mesh import DeviceMesh

    kinds = (dist.ProcessGroup, DeviceMesh, LocalGroup, tuple)
    if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, kinds):
        raise ValueError(_EXPECTED.format(group))


def place(group: object) -> tuple[int, int]:
    """Return (rank, world size) over all ranks of `group`. With two groups, ranks are numbered node by node."""
    if isinstance(group, LocalGroup):
        return group.rank, group.size
    rank, size = 0, 1
    for member in reversed(_groups(group)):
        rank, size = rank * dist.get_world_size(member) + dist.get_rank(member), size * dist.get_world_size(member)
    return rank, size


def compressing_ranks(group: object) -> int:
    """Return the number of compressed payloads in a sum: one for each rank, or with two groups one for each node."""
    return group.size if isinstance(group, LocalGroup) else dist.get_world_size(_groups(group)[-1])


def _groups(group: object) -> list[dist.ProcessGroup]:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    if group is None:
        assert dist.group.WORLD is not None
        return [dist.group.WORLD]
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
    if isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return [_member(group)]
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 2:
            raise ValueError(f"a mesh of {group.ndim} dimensions, expected two: (nodes, ranks of a node)")
        return [_member(group.get_group(1)), _member(group.get_group(0))]
    raise ValueError(_EXPECTED.format(group))


def _member(group: object) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only its members may call")
    return group
