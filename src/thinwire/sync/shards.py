"""The ranks that hold the shards of one replica of a model, and what they decide together.

A sharded model has a synchronizer for each shard. What holds for the whole model must be alike on all shards: whether a
step is finite, the norm of the gradient, what is measured, and that the step has failed.
"""

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import all_reduce_compressed
from ..collectives.groups import channels, place
from ..collectives.transport.operation import Operation, check_timeout


def is_sharded(tensor: object) -> bool:
    """Return whether this is a DTensor, without loading torch's module of DTensors, which takes seconds."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory; return a plain tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


class ShardGroup:
    """The ranks that hold the shards of this rank's replica, whose exchanges on `device` count as no bytes sent."""

    def __init__(self, group: dist.ProcessGroup, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        self.group, self.parameters, self.device = group, parameters, device
        self.numels = {name: parameter.numel() for name, parameter in parameters.items()}  # over all shards
        self.rank, self.size = place(group)
        self.place = [self.rank, self.size]  # as a checkpoint has them
        self.timeout: float | timedelta | None = None  # set by the synchronizer
        self.raised: Exception | None = None  # the last error of an exchange here, which all shards know

    def distributed(self, name: str, local: Tensor) -> Tensor:
        """Return a tensor of this rank, in the shape of its shard of a parameter, as part of one over all shards."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        like: Any = self.parameters[name]
        if not isinstance(like, DTensor):
            return local
        made: Any
        if local.device.type == like.device_mesh.device_type:
            made = DTensor.from_local(
                local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
            )
        else:  # offloaded to the CPU, from where `from_local` would move it
            meta = TensorMeta(like.shape, like.stride(), local.dtype)
            spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
            made = DTensor(local, spec, requires_grad=False)
        return made  # type: ignore[no-any-return]

    def shard(self, name: str) -> Tensor:
        return local_of(self.parameters[name])

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum over the shards, alike on each. Raise CollectiveError if one has failed or is silent."""
        if self.size == 1:
            return tensor
        total = tensor.detach().to(self.device, copy=True)
        try:
            # By gather, which sends a small tensor in one message.
            all_reduce_compressed(total, "none", group=self.group, algorithm="gather", timeout=self.timeout)
        except Exception as error:
            self.raised = error
            raise
        return total.to(tensor.device)

    def all_finite(self, finite: bool | None) -> bool | None:
        """Return whether all shards are finite; None stays None, which it is on all shards or on none."""
        if finite is None or self.size == 1:
            return finite
        return not float(self.add(torch.tensor([float(not finite)], dtype=torch.float32)))

    def report(self, error: Exception) -> None:
        """Report an error of this rank to the other shards, whose next exchange here raises it."""
        if self.size == 1:
            return
        for channel in channels(self.group, self.device):
            operation = Operation(channel)
            operation.limit(check_timeout(self.timeout))
            operation.refuse(f"the step failed on this rank: {error}")
