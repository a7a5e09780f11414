"""SGD that compresses each rank's momentum instead of its gradient (Lin et al. 2018: momentum correction)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ..collectives.collective import DEFAULT_COLLECTIVE, Collective
from ..collectives.groups import Group
from ..kernels.updates import MomentumUpdate
from ..sync.buckets import Slice, flat
from ..sync.policy import DEFAULT, Policy, Spec
from .base import CompressedOptimizer, Params, policy_of
from .families import Family
from .guard import check_numbers, check_torch_options
from .rule import Piece, Rule, sent_rate

_COMPRESSED_MOMENTUM = 0.5


class SGD(CompressedOptimizer):
    """SGD for slow networks: it exchanges compressed momentum instead of gradients.

    lr, momentum, weight_decay, nesterov   as in torch. `momentum` applies to everything that is sent as a gradient: the
                  warm-up, and small and excluded tensors.
    compressed_momentum  the momentum of compressed updates; by default `momentum`, but 0.5 at most: error feedback
                  delays an element, which acts as momentum by itself. Updates are multiplied by
                  (1 - compressed_momentum) / (1 - momentum), so that a gradient moves the weights as far in the long
                  run as with torch's SGD: by lr / (1 - momentum).
    warmup_steps  number of steps that send gradients, compressed by `warmup`, and do the same as torch's SGD.
    dampening     accepted if it is 0.
    others        as for `AdamW`.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        compressed_momentum: float | None = None,
        compressor: Spec | Policy = DEFAULT,
        warmup_steps: int = 0,
        warmup: Spec = "quantize:bits=8",
        max_grad_norm: float | None = None,
        ddp: DistributedDataParallel | None = None,
        group: Group = None,
        collective: Collective = DEFAULT_COLLECTIVE,
        grad_scaler: GradScaler | None = None,
        **torch_options: Any,
    ) -> None:
        check_torch_options({"dampening": dampening, **torch_options})
        policy = policy_of(compressor, warmup_steps, warmup)
        sgd = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        options: dict[str, Any] = {"group": group, "collective": collective, "grad_scaler": grad_scaler}
        defaults = {**sgd, "compressed_momentum": compressed_momentum}
        super().__init__(params, defaults, MomentumRule(), policy, ddp=ddp, max_grad_norm=max_grad_norm, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = {**self.defaults, **param_group}
        if given["compressed_momentum"] is None:
            check_numbers(given, "momentum", below=1.0)
            given["compressed_momentum"] = min(float(given["momentum"]), _COMPRESSED_MOMENTUM)
        super().add_param_group(given)


class MomentumRule(Rule):
    """Sends lr / reference_lr * momentum, scaled so that a gradient moves the weights as far as with torch's SGD."""

    moments = ("momentum_buffer",)
    local_moments = ("momentum_buffer",)
    settings = ("momentum", "lr", "weight_decay", "nesterov")

    def check(self, group: Mapping[str, Any]) -> None:
        check_numbers(group, "lr", "weight_decay")
        check_numbers(group, "momentum", "compressed_momentum", below=1.0)
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("nesterov with momentum 0, expected a momentum above 0")

    def numbers(self, family: Family, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "momentum": group["compressed_momentum"],
            "nesterov": group["nesterov"],
            "rate": sent_rate(group) * _ratio(group),
            "decay": group["weight_decay"],
        }

    def update(self, slice_: Slice, moments: Sequence[Tensor], factor: float, **numbers: Any) -> MomentumUpdate:
        places = tuple(self._places(slice_)) if numbers["decay"] else ()  # weight decay is a part of the momentum
        return MomentumUpdate(moments[0] if numbers["momentum"] else None, factor=factor, parameters=places, **numbers)

    def _places(self, slice_: Slice) -> Iterator[tuple[int, int, Tensor]]:
        start = 0
        for name, size in slice_.key:
            if name is not None:
                yield start, start + size, flat(self.parameters.tensors[name].detach())
            start += size

    def step_by_gradients(self, piece: Piece) -> None:
        group, gradients = piece.group, piece.tensors
        momentum = group["momentum"]
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, piece.parameters, alpha=group["weight_decay"]))
        if momentum:
            buffers = self.parameters.moments("momentum_buffer", piece.names)
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, gradients)
            gradients = list(torch._foreach_add(gradients, buffers, alpha=momentum)) if group["nesterov"] else buffers
        updates = [gradient.to(p.dtype) for p, gradient in zip(piece.parameters, gradients, strict=True)]
        torch._foreach_add_(piece.parameters, updates, alpha=-piece.lr)

    def step_by_updates(self, piece: Piece) -> None:
        torch._foreach_add_(piece.parameters, piece.tensors, alpha=-piece.group["reference_lr"])

    def to_updates(self, names: Collection[str]) -> None:
        for name in names:
            if name in self.parameters.vectors["momentum_buffer"]:
                self.parameters.vectors["momentum_buffer"][name].div_(_ratio(self.parameters.group_of(name)))

    def to_torch(self, name: str, moments: dict[str, Tensor]) -> None:
        moments["momentum_buffer"].mul_(_ratio(self.parameters.group_of(name)))


def _ratio(group: Mapping[str, Any]) -> float:
    """Return the factor of momentum when it is sent, so that a gradient moves weights as far in the long run."""
    return float((1 - group["compressed_momentum"]) / (1 - group["momentum"]))
