"""Models sharded by FSDP2 in tests: a mesh of replicas and shards, a model on it, the bits of this rank's shards."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from support.oracle import bytes_of
from support.training import make_batch, make_net


def make_mesh(world_size: int, shards: int) -> Any:
    """The mesh of an HSDP user: ("replicate", "shard"); rank r is shard r % shards of replica r // shards."""
    from torch.distributed.device_mesh import init_device_mesh  # loading FSDP takes seconds: only where it is used

    torch.set_num_threads(1)
    return init_device_mesh("cpu", (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: Any, parts: Iterable[nn.Module] | None = None, **options: Any) -> nn.Module:
    """The model sharded over `mesh["shard"]`: each linear layer by itself, and then the rest."""
    from torch.distributed.fsdp import fully_shard

    for part in [layer for layer in model if isinstance(layer, nn.Linear)] if parts is None else parts:  # type: ignore[attr-defined]
        fully_shard(part, mesh=mesh["shard"], **options)
    fully_shard(model, mesh=mesh["shard"], **options)
    return model


def sharded_net(mesh: Any, **options: Any) -> nn.Module:
    return shard(make_net(), mesh, **options)


def local_parts(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of every parameter."""
    with torch.no_grad():
        return {name: getattr(p, "to_local", lambda p=p: p)() for name, p in model.named_parameters()}


def local_bits(model: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(part.detach()) for name, part in local_parts(model).items()}


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter over all shards; all ranks of a replica must call this."""
    full = ((name, getattr(p, "full_tensor", lambda p=p: p)()) for name, p in model.named_parameters())
    return {name: tensor.detach().clone() for name, tensor in full}


def take_step(model: nn.Module, optimizer: Any, batches: Iterable[int], step: int) -> float:
    """One step on the batches of these ranks together."""
    optimizer.zero_grad()
    parts = [make_batch(rank, step) for rank in batches]
    given, wanted = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    value = (model(given) - wanted).float().square().mean()
    value.backward()
    optimizer.step()
    return float(value.detach())
