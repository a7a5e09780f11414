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
    state: dict[str, Any] = model.state_dict()
    return {name: part.full_tensor() if hasattr(part, "full_tensor") else part for name, part in state.items()}


def scatter_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load whole tensors into a sharded model, of which each rank takes its shard; raise errors as load_state_dict."""
    from torch.distributed.tensor import distribute_tensor

    loaded = dict(weights)
    for name, like in model.state_dict().items():
        if hasattr(like, "device_mesh") and name in weights and weights[name].shape == like.shape:
            whole = weights[name].to(like.device)
            loaded[name] = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    model.load_state_dict(loaded)
