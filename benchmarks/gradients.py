"""Simulates ranks by threads and computes the gradients of all, in one model, or in models with weights of their own.

On a GPU, kernel launches limit the speed of a small model. So the samples of all ranks go through it in one pass, if
`torch.func.vmap` can keep the ranks apart, and launches are recorded in a CUDA graph that is replayed at every step. In
any case, row r of `flat` is the gradient that rank r would compute by itself.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from thinwire.collectives import CollectiveError
from thinwire.collectives.local import LocalGroup, LocalWorld
from thinwire.kernels.recording import Recording, RecordingMemory
from thinwire.sync.buckets import Bucket
from thinwire.testing.pool import RankClass, RankError
from thinwire.tools.train.models import GPT

_LONGEST_CONTEXT = 256
"""Longest context for one pass over all ranks: attention under vmap takes memory with its square."""


class Gradients:
    """The gradients of all ranks at a step.

    models  the model with the weights of every rank; or one for each rank, with weights of its own, which are moved
            into one tensor. The weights may change in place.
    ranks   number of ranks.
    bf16    whether the model computes in bfloat16 (autocast).
    """

    def __init__(self, models: Sequence[nn.Module], ranks: int, *, bf16: bool) -> None:
        self._models, self._ranks, self._bf16 = models, ranks, bf16
        self._named = [list(reversed(list(model.named_parameters()))) for model in models]
        self.names = tuple(name for name, _ in self._named[0])
        self.sizes = tuple(parameter.numel() for _, parameter in self._named[0])
        first = self._named[0][0][1]
        self.flat = torch.zeros(ranks, sum(self.sizes), dtype=first.dtype, device=first.device)
        self._weights = torch.zeros_like(self.flat) if len(models) > 1 else None
        """The weights of each rank, if they have their own."""
        self._batch: tuple[Tensor, Tensor] | None = None
        self._recording = Recording(RecordingMemory())
        if self._weights is not None:
            for row, named in zip(self._weights, self._named, strict=True):
                for (_, parameter), part in zip(named, row.split(list(self.sizes)), strict=True):
                    part.view(parameter.shape).copy_(parameter.detach())
                    parameter.data = part.view(parameter.shape)

    def bucket(self, rank: int) -> Bucket:
        return Bucket(self.flat[rank], self.names, self.sizes)

    def compute(self, batch: Sequence[Tensor]) -> None:
        """Fill `flat` from the samples of all ranks, in their order; in one thread, because of the recording."""
        inputs, targets = (part.unflatten(0, (self._ranks, -1)) for part in batch)
        if self._batch is None:
            self._batch = inputs.to(self.flat.device), targets.to(self.flat.device)
        for kept, part in zip(self._batch, (inputs, targets), strict=True):
            kept.copy_(part, non_blocking=True)
        if self.flat.is_cuda:
            self._recording.run("gradients", self._fill)
        else:
            self._fill()

    def _fill(self) -> None:
        assert self._batch is not None
        inputs, targets = self._batch
        if self._ranks > 1 and isinstance(self._models[0], GPT) and inputs.shape[-1] <= _LONGEST_CONTEXT:
            self._fill_at_once(inputs, targets)
            return
        for rank, row in enumerate(self.flat):
            own = rank if self._weights is not None else 0
            with precision(self.flat.device, bf16=self._bf16):
                loss = cross_entropy(self._models[own](inputs[rank]), targets[rank])
            found = torch.autograd.grad(loss, [parameter for _, parameter in self._named[own]])
            torch.cat([each.reshape(-1) for each in found], out=row)

    def _fill_at_once(self, inputs: Tensor, targets: Tensor) -> None:
        def loss(parameters: dict[str, Tensor], some: Tensor, wanted: Tensor) -> Tensor:
            return cross_entropy(functional_call(self._models[0], parameters, (some,)), wanted)

        parameters = {name: parameter.detach() for name, parameter in self._named[0]}
        if self._weights is not None:
            parts = zip(self._named[0], self._weights.split(list(self.sizes), dim=1), strict=True)
            parameters = {name: part.unflatten(1, parameter.shape) for (name, parameter), part in parts}
        with sdpa_kernel(SDPBackend.MATH), precision(self.flat.device, bf16=self._bf16):
            per_rank = vmap(grad(loss), in_dims=(None if self._weights is None else 0, 0, 0))
            found = per_rank(parameters, inputs, targets)
        torch.cat([found[name].flatten(1) for name in self.names], dim=1, out=self.flat)


def precision(device: torch.device, *, bf16: bool) -> AbstractContextManager[object]:
    # The cache of autocast would keep the weights from when a CUDA graph was recorded.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if bf16 else nullcontext()


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of scores, which may be of a text."""
    return F.cross_entropy(scores.float().flatten(0, -2), targets.flatten())


class Threads:
    """Runs ranks as threads, in the place of `Workers`. Objects also get their `group`, and the list of all objects."""

    def __init__(self) -> None:
        self._world: LocalWorld | None = None
        self._ranks: list[Any] = []

    def form(self, size: int, rank_class: RankClass, *args: object) -> None:
        """Form a world of `size` ranks and build an object on each, in place of the previous ones."""
        self._world = LocalWorld(size, turns=True)
        self._ranks.clear()
        for group in self._world.groups:
            self._ranks.append(rank_class(group.rank, size, *args, group=group, ranks=self._ranks))

    def ask(self, method: str, *args: object) -> list[Any]:
        """Call a method of the object on each rank, in its thread, and return the results, ordered by rank.

        Raises RankError if a rank raises.
        """
        assert self._world is not None

        def answer(group: LocalGroup) -> Any:
            try:
                return getattr(self._ranks[group.rank], method)(*args)
            except CollectiveError:  # another rank may be the cause
                raise
            except Exception as error:
                text = f"rank {group.rank} of {group.size} raised {type(error).__name__}: {error}"
                raise RankError(text) from error

        try:
            return self._world.run(answer)
        except CollectiveError as error:
            raise RankError(str(error)) from error
