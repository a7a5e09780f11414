"""A model sharded by FSDP2 over the ranks of a replica, for `thinwire train --shard`."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh


def shard_model(model: nn.Module, shard: int, device: torch.device) -> Any:
    """Shard a model over groups of `shard` ranks, block by block, and return the mesh of (replicate, shard)."""
    from torch.distributed.fsdp import fully_shard  # takes seconds to load

    shape = dist.get_world_size() // shard, shard
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    for part in (*getattr(model, "blocks", ()), model):
        fully_shard(part, mesh=mesh["shard"])
    return mesh


@torch.no_grad()
def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a sharded model with whole tensors. All ranks of a replica call this."""
    return {name: _whole(tensor) for name, tensor in model.state_dict().items()}


def _whole(tensor: Tensor) -> Tensor:
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def scatter_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load whole tensors into a sharded model, of which each rank takes its shard; raise errors as load_state_dict."""
    from torch.distributed.tensor import distribute_tensor

    def shard_of(name: str, like: Any) -> Tensor:
        whole = weights[name].to(like.device)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

    here = model.state_dict()
    fits = {name for name, like in here.items() if hasattr(like, "device_mesh") and name in weights}
    fits = {name for name in fits if weights[name].shape == here[name].shape}
    model.load_state_dict({name: shard_of(name, here[name]) if name in fits else w for name, w in weights.items()})
