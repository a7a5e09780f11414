"""Models sharded by FSDP2 in tests: a mesh of replicas and shards, a model on it, the bits of this rank's shards.

Four ranks are two replicas of two shards: ranks 0 and 1 hold one replica, ranks 2 and 3 the other. Forming a group and
a mesh takes longer than most tests, so those that need nothing else share one run: `call_all`.
"""

import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from support.oracle import bytes_of
from support.training import make_batch, make_net
from thinwire.testing import RankPool

SECONDS = 120.0
"""The time-out of a run; loading FSDP takes seconds on each rank."""
Call = tuple[Callable[..., Any], *tuple[Any, ...]]
"""A function of a rank, (rank, mesh, *arguments), and its arguments."""


class Raised(NamedTuple):
    """Stands in place of what a function would have returned."""

    trace: str


class Found:
    """What functions have returned on all ranks, by their names."""

    def __init__(self, by_rank: list[dict[str, Any]]) -> None:
        self._by_rank = by_rank

    def __getitem__(self, name: str) -> list[Any]:
        found = [each[name] for each in self._by_rank]
        for rank, value in enumerate(found):
            if isinstance(value, Raised):
                pytest.fail(f"rank {rank} raised\n{value.trace}")
        return found


def call_all(ranks: RankPool, calls: Mapping[str, Call], *, world_size: int = 4, shards: int = 2) -> Found:
    """Call functions one after the other in one run, on one mesh; an error is that of its function alone."""
    return Found(ranks.run(_call_all, world_size, shards, dict(calls), timeout=len(calls) * SECONDS))


def _call_all(rank: int, world_size: int, shards: int, calls: dict[str, Call]) -> dict[str, Any]:
    mesh, found = make_mesh(world_size, shards), {}
    for name, (function, *arguments) in calls.items():
        try:
            found[name] = function(rank, mesh, *arguments)
        except Exception:
            found[name] = Raised(traceback.format_exc())
    return found


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


def spoil_last_rank(model: nn.Module, rank: int) -> list[bool]:
    """While [0] of what this returns is True, the shard of rank 3 has a NaN in a gradient."""
    bad = [False]

    def spoil(parameter: Any) -> None:
        if bad[0]:
            parameter.grad.to_local().view(-1)[0] = torch.nan

    if rank == 3:
        dict(model.named_parameters())["4.weight"].register_post_accumulate_grad_hook(spoil)
    return bad


def take_step(model: nn.Module, optimizer: Any, batches: Iterable[int], step: int) -> float:
    """One step on the batches of these ranks together."""
    optimizer.zero_grad()
    parts = [make_batch(rank, step) for rank in batches]
    given, wanted = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    value = (model(given) - wanted).float().square().mean()
    value.backward()
    optimizer.step()
    return float(value.detach())


def apart(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference between two sets of parameters."""
    return max(float((tensor - second[name]).abs().max()) for name, tensor in first.items())


def options(kind: str, **others: Any) -> dict[str, Any]:
    """A short warm-up, and averages of second moments in a short run."""
    return {"warmup_steps": 2, **({"refresh_every": 4} if kind == "AdamW" else {}), **others}
