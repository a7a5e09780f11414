"""The common weights of `LocalSteps`, in fragments: which tensors are exchanged together, and how they move."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..kernels.layout import residual_dtype
from ..sync.buckets import Bucket, group_parameters, shaped

Named = Sequence[tuple[str, Tensor]]


class Part:
    """Tensors of one bucket, and common values, wide and alike on all ranks, from which each rank has moved them."""

    @torch.no_grad()
    def __init__(self, named: Named, *, is_averaged: bool, device: torch.device | None) -> None:
        self.tensors = [tensor for _, tensor in named]
        self.is_averaged = is_averaged  # of buffers: they become the average, whatever the outer optimizer is
        sizes = tuple(tensor.numel() for tensor in self.tensors)
        wide = residual_dtype(self.tensors[0].dtype)
        self.common = torch.empty(sum(sizes), dtype=wide, device=device or self.tensors[0].device)
        self.names = tuple(name for name, _ in named)
        self._layout = Bucket(self.common, self.names, sizes)
        self.momentum: Tensor | None = None  # the outer one
        self.before: Tensor | None = None  # local values whose difference is under way, if steps are taken meanwhile
        self.take_common()

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return self.bucket(flat).parts()

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        flat = torch.empty_like(self.common)
        for name, view in self.named(flat).items():
            view.copy_(named[name].view(-1))
        return flat

    def load(self, common: Mapping[str, Tensor], momentum: Mapping[str, Tensor]) -> None:
        self.common.copy_(self.flat(common))
        self.momentum = self.flat(momentum) if self.names[0] in momentum else None

    def local(self) -> Tensor:
        flat = torch.empty_like(self.common)
        torch._foreach_copy_(self._shaped(flat), self.tensors)
        return flat

    def take_common(self) -> None:
        torch._foreach_copy_(self._shaped(self.common), self.tensors)

    def difference(self, *, is_overlapped: bool) -> Bucket:
        """Return the common values less the local ones, which are kept in `before` if steps are taken meanwhile."""
        local = self.local()
        self.before = local if is_overlapped else None
        out = None if is_overlapped else local
        return self.bucket(torch.sub(self.common, local, out=out))

    def bucket(self, flat: Tensor) -> Bucket:
        return self._layout._replace(tensor=flat)

    def move(self, mean: Tensor, *, lr: float, momentum: float, nesterov: bool) -> None:
        """Move common values against the mean, by SGD with momentum, and local ones along: later steps stay."""
        if self.is_averaged:
            lr, momentum = 1.0, 0.0
        if momentum:
            self.momentum = torch.zeros_like(mean) if self.momentum is None else self.momentum
            self.momentum.mul_(momentum).add_(mean)
            mean = mean.add(self.momentum, alpha=momentum) if nesterov else self.momentum
        self.common.sub_(mean, alpha=lr)
        if self.before is None:
            self.set_local(self.common)
        else:
            self.set_local(self.local().sub_(self.before).add_(self.common))
            self.before = None

    def set_local(self, flat: Tensor) -> None:
        torch._foreach_copy_(self.tensors, self._shaped(flat))

    def restart(self) -> None:
        """Give up what this rank has done since the last exchange: its values become the common ones."""
        self.set_local(self.common)
        if self.before is not None:
            self.before.copy_(self.common)

    def _shaped(self, flat: Tensor) -> list[Tensor]:
        return [shaped(part, tensor) for part, tensor in zip(self.named(flat).values(), self.tensors, strict=True)]


class Fragment:
    """The part of a model that is exchanged at one time."""

    def __init__(self, parameters: Named, buffers: Named, device: torch.device | None) -> None:
        self.parts = [
            Part(group, is_averaged=is_averaged, device=device)
            for named, is_averaged in ((parameters, False), (buffers, True))
            for group in group_parameters(named)
        ]
        self.names = frozenset(name for part in self.parts for name in part.names)
        self.exchanged_at = 0  # local steps before the last exchange


def split(named: Named, fragments: int) -> list[list[tuple[str, Tensor]]]:
    """Cut a list of tensors into consecutive ones of about as many elements, none of them empty.

    >>> sizes = [("a", torch.empty(5)), ("b", torch.empty(1)), ("c", torch.empty(4)), ("d", torch.empty(2))]
    >>> [[name for name, _ in one] for one in split(sizes, 3)]
    [['a'], ['b', 'c'], ['d']]
    """
    total, so_far, made = sum(tensor.numel() for _, tensor in named), 0, [[named[0]]]
    for index, (name, tensor) in enumerate(named[1:], start=1):
        so_far += named[index - 1][1].numel()
        is_full = so_far * fragments >= total * len(made)
        if len(made) < fragments and (is_full or len(named) - index <= fragments - len(made)):
            made.append([])
        made[-1].append((name, tensor))
    return made
