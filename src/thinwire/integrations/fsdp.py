"""FSDP2: models sharded by `fully_shard` inside a replica, and exchanged between replicas by thinwire.

    mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = thinwire.AdamW(model, lr=1e-3, group=mesh["replicate"])

FSDP averages gradients inside a replica, as it does alone. Each rank then exchanges its shard with the ranks that hold
the same shard of the other replicas. FSDP calls hooks when gradients are reduced, and a bucket is sent when all of its
gradients are there. All else in thinwire works on the local tensor of a `DTensor`.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives.groups import Group, as_group
from ..sync.buckets import Bucket, flatten, group_parameters
from ..sync.shards import ShardGroup, is_sharded, local_of
from ..sync.synchronizer import Synchronizer
from .ddp import after_backward

_SAMPLES = 1024  # elements of a bucket, to see whether gradients were changed after they were sent


def check_module(module: nn.Module) -> None:
    """Raise ValueError for a model that was sharded by FSDP1, or that is not sharded at this moment."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for child in module.modules():
        if isinstance(child, fsdp.FullyShardedDataParallel):
            raise ValueError(
                "a FullyShardedDataParallel, which keeps parameters flattened; shard the model with "
                "torch.distributed.fsdp.fully_shard instead (FSDP2)"
            )
        if isinstance(child, fsdp.FSDPModule) and not any(map(is_sharded, child.parameters())):
            raise ValueError("a model whose parameters are gathered at this moment; call its reshard() first")


def sharded_parameters(named: Mapping[str, Tensor], group: Group) -> "ShardedParameters | None":
    """Return a sharded model's parameters, to exchange between the ranks of `group`; None if it is not sharded."""
    found = {name: parameter for name, parameter in named.items() if is_sharded(parameter)}
    if not found:
        return None
    plain = [name for name, parameter in named.items() if name not in found and parameter.requires_grad]
    if plain:
        raise ValueError(
            f"parameter {plain[0]!r} is a plain tensor, while {next(iter(found))!r} is sharded: shard the whole model, "
            "fully_shard(model, mesh=...) after its parts, or set requires_grad=False"
        )
    for name, parameter in found.items():
        _check_placement(name, parameter)
    mesh, *others = (parameter.device_mesh for parameter in found.values())  # type: ignore[attr-defined]
    if any(other != mesh for other in others):
        raise ValueError("parameters on different meshes, expected one mesh for the whole model")
    _check_group(group, mesh)
    return ShardedParameters(named, mesh)


def _check_placement(name: str, parameter: Any) -> None:
    mesh, placements = parameter.device_mesh, parameter.placements
    names = mesh.mesh_dim_names or tuple(f"dimension {index}" for index in range(mesh.ndim))
    if mesh.ndim == 1 and type(placements[0]).__name__ == "Shard":
        return
    shards = [dim for dim, placement in zip(names, placements, strict=True) if placement.is_shard()]
    copies = [dim for dim, placement in zip(names, placements, strict=True) if placement.is_replicate()]
    if mesh.ndim == 2 and len(shards) == len(copies) == 1:
        raise ValueError(
            f"parameter {name!r} is on a mesh of {mesh.ndim} dimensions, {names}: FSDP itself would average between "
            f'replicas, uncompressed. Give fully_shard(..., mesh=mesh["{shards[0]}"]), and the optimizer '
            f'group=mesh["{copies[0]}"]'
        )
    raise ValueError(
        f"parameter {name!r} is placed as {placements} on a mesh of {mesh.ndim} dimensions, expected one Shard on a "
        'mesh of one dimension: fully_shard(model, mesh=mesh["shard"]); tensor parallelism is not supported'
    )


def _check_group(group: Group, mesh: Any) -> None:
    if group is None:
        raise ValueError(
            "a sharded model without group=, expected the ranks that hold the same shard of the other replicas: "
            'group=mesh["replicate"]'
        )
    group = as_group(group)
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group {group!r} for a sharded model, expected one process group or a mesh of one dimension: "
            'group=mesh["replicate"]'
        )
    shared = set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(mesh.get_group()))
    if shared != {dist.get_rank()}:
        raise ValueError(
            f"the group has the ranks {sorted(shared)} of this replica, expected this rank, {dist.get_rank()}, alone: "
            'the ranks that hold the same shard of the other replicas, group=mesh["replicate"]'
        )


class ShardedParameters:
    """The parameters of a sharded model, and this rank's shard of each as a plain tensor."""

    def __init__(self, named: Mapping[str, Any], mesh: Any) -> None:
        self._named = dict(named)
        device = torch.device(mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.group = ShardGroup(mesh.get_group(), self._named, device)
        self.tensors: dict[str, Tensor] = {}  # this rank's shards, in the parameters' memory; always the same dict
        self._sampled: list[tuple[Bucket, Tensor, Tensor]] = []  # buckets, positions in them, and elements there
        self._positions: dict[tuple[str, ...], Tensor] = {}
        self._refresh(self._named)
        self.is_offloaded = any(tensor.device.type != device.type for tensor in self.tensors.values())
        """True if gradients are on another device than the collectives: they are complete after the backward pass."""

    def _refresh(self, names: Iterable[str]) -> None:
        """Look where the shards are now: a checkpoint may have brought other memory."""
        for name in names:
            now, known = local_of(self._named[name]), self.tensors.get(name)
            if known is None or known.data_ptr() != now.data_ptr() or known.shape != now.shape:
                self.tensors[name] = now.detach()

    def groups(self) -> list[list[str]]:
        """Return the names of all parameters with a gradient, bucket by bucket, alike on all shards."""
        self.forget_buckets()
        trained = [(name, self.tensors[name]) for name, p in self._named.items() if p.requires_grad]
        # Shards may be uneven, but all of them must have the same parameters in a bucket.
        nbytes = {name: -(-self.group.numels[name] // self.group.size) * tensor.itemsize for name, tensor in trained}
        return [[name for name, _ in group] for group in group_parameters(trained, nbytes)]

    @torch.no_grad()
    def bucket(self, names: Sequence[str]) -> Bucket:
        """Copy the gradients of some parameters into one bucket, and make them views of it."""
        self._refresh(names)
        for name in names:
            grad = self._named[name].grad
            self.tensors[name].grad = None if grad is None else local_of(grad)
        made = flatten([(name, self.tensors[name]) for name in names])
        for name in names:
            tensor = self.tensors[name]
            assert tensor.grad is not None
            self._named[name].grad = self.group.distributed(name, tensor.grad)
            tensor.grad = None  # or it would keep the bucket's memory after zero_grad
        positions = self._positions_in(made)
        self._sampled.append((made, positions, made.tensor[positions]))
        return made

    def _positions_in(self, bucket: Bucket) -> Tensor:
        """Return positions in a bucket: some with the same distance, and the first element of each parameter."""
        if bucket.names not in self._positions:
            ends = list(accumulate(bucket.sizes))
            firsts = [end - size for size, end in zip(bucket.sizes, ends, strict=True) if size]
            spread = range(0, bucket.tensor.numel(), max(1, bucket.tensor.numel() // _SAMPLES))
            chosen = torch.tensor(sorted({*firsts, *spread}), dtype=torch.long, device=bucket.tensor.device)
            self._positions[bucket.names] = chosen
        return self._positions[bucket.names]

    def changed(self) -> str | None:
        """Return a parameter whose gradient has changed, of which torch counts nothing if many DTensors change."""
        for bucket, positions, before in self._sampled:
            now = bucket.tensor[positions]
            differs = (now != before) & ~(now.isnan() & before.isnan())
            if bool(differs.any()):
                place = int(positions[differs][0])
                ends = accumulate(bucket.sizes)
                return next(name for name, end in zip(bucket.names, ends, strict=True) if place < end)
        return None

    def spoil(self) -> None:
        """Fill the gradients of a pass that has failed with NaN: some may be averages, and others not."""
        for bucket, _, _ in self._sampled:
            bucket.tensor.fill_(torch.nan)
        self.forget_buckets()

    def forget_buckets(self) -> None:
        self._sampled = []

    def register_hook(self, hook: Callable[[str], None]) -> None:
        """Let FSDP call `hook` with the name of each parameter whose gradient is reduced, in place of any before."""
        for name, parameter in self._named.items():
            kept = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            for key in [key for key, each in kept.items() if isinstance(each, _ParameterHook)]:
                del kept[key]
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_ParameterHook(hook, name))


class _ParameterHook:
    """The hook of one parameter; weak, because torch would keep what it refers to, and so the parameter, for ever."""

    def __init__(self, hook: Callable[[str], None], name: str) -> None:
        self._hook, self._name = weakref.WeakMethod(hook), name

    def __call__(self, _: Tensor) -> None:
        hook = self._hook()
        if hook is not None:
            hook(self._name)


class AttachedModel:
    """Averages the gradients of a sharded model in its backward pass, for any optimizer."""

    def __init__(self, parameters: ShardedParameters, sync: Synchronizer) -> None:
        self.sync, self._parameters, self.add_bucket = sync, parameters, sync.add_bucket
        sync.register_parameters(parameters.tensors.items())
        self._backward = BackwardPass(parameters, self)

    def end_backward(self, error: Exception | None) -> None:
        """Wait for the averages, which are then in the gradients; after an error, the gradients are NaN."""
        try:
            if error is not None:
                raise error
            self.sync.finish()
        except Exception:
            self._parameters.spoil()
            raise
        self._parameters.forget_buckets()


class BackwardPass:
    """Sends the buckets of a sharded model in its backward pass.

    A parameter is reduced as often as its module has run in the forward pass. So the first backward pass counts, and
    sends everything at its end. Later ones send a bucket when as many gradients have come as in the pass before.
    """

    def __init__(self, parameters: ShardedParameters, receiver: Any) -> None:
        """Register the hooks, which have an effect as long as this object and its receiver, an optimizer or model."""
        self._parameters, self._receiver = parameters, weakref.ref(receiver)
        self._expected: Counter[str] = Counter()
        self.reset()
        parameters.register_hook(self._on_gradient)

    def reset(self) -> None:
        self._came: Counter[str] = Counter()
        self._groups: list[list[str]] = []
        self._sent = 0  # buckets
        self._task = -1
        self._error: Exception | None = None

    def _on_gradient(self, name: str) -> None:
        receiver, task = self._receiver(), torch._C._current_graph_task_id()
        if receiver is None:
            return
        if self._came[name] and self._task != task and self._came[name] >= self._expected[name]:
            self.reset()  # the pass before ended with an error in the caller's model
        if not self._came:
            self._groups, self._task = self._parameters.groups(), task
            after_backward(self._end)
        self._came[name] += 1
        if any(name in names for names in self._groups[: self._sent]):
            self._error = self._error or RuntimeError(
                f"parameter {name!r} got more gradient after it was sent: its module ran more often than in the step "
                "before; let every step run the same modules, or fully_shard the module around it"
            )
        while self._sent < len(self._groups) - 1 and all(
            0 < self._expected[each] <= self._came[each] for each in self._groups[self._sent]
        ):
            self._send(receiver)

    def _send(self, receiver: Any) -> None:
        """Send the next bucket, unless one before it has failed: FSDP's backward pass must not be interrupted."""
        number, self._sent = self._sent, self._sent + 1
        if self._error is None:
            try:
                bucket = self._parameters.bucket(self._groups[number])
                receiver.add_bucket(bucket, first=number == 0, last=self._sent == len(self._groups))
            except Exception as error:
                self._error = error

    def _end(self) -> None:
        """Send all other buckets; raise the error of this pass, and report it to the other shards."""
        receiver = self._receiver()
        if receiver is None or not self._came:
            return
        while self._sent < len(self._groups):
            self._send(receiver)
        error, self._expected = self._error, self._came
        self.reset()
        with receiver.sync.reporting(next(iter(self._parameters.tensors.values())).device):
            receiver.end_backward(error)
