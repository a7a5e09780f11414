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
from ..sync.step import Rule
from .base import CompressedOptimizer, Piece
from .checks import check_number, check_torch_options, policy_of
from .families import Family
from .parameters import Params

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

    moments = ("momentum_buffer",)
    local_moments = ("momentum_buffer",)

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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "compressed_momentum": compressed_momentum,
        }
        super().__init__(
            params,
            defaults,
            policy_of(compressor, warmup_steps, warmup),
            ddp=ddp,
            max_grad_norm=max_grad_norm,
            grad_scaler=grad_scaler,
            group=group,
            collective=collective,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = {**self.defaults, **param_group}
        if given["compressed_momentum"] is None:
            check_number("momentum", given["momentum"], below=1.0)
            given["compressed_momentum"] = min(float(given["momentum"]), _COMPRESSED_MOMENTUM)
        super().add_param_group(given)

    def _check_settings(self, given: Mapping[str, Any]) -> None:
        check_number("lr", given["lr"])
        check_number("weight_decay", given["weight_decay"])
        for name in ("momentum", "compressed_momentum"):
            check_number(name, given[name], below=1.0)
        if given["nesterov"] and not given["momentum"]:
            raise ValueError("nesterov with momentum 0, expected a momentum above 0")

    def _rule(self, family: Family) -> Rule:
        group = self.param_groups[family.group]
        momentum, decay = group["compressed_momentum"], group["weight_decay"]
        rate = self._rate(group) * _momentum_ratio(group)

        def update(slice_: Slice, moments: Sequence[Tensor], factor: float) -> MomentumUpdate:
            return MomentumUpdate(
                m=moments[0] if momentum else None,
                momentum=momentum,
                factor=factor,
                nesterov=group["nesterov"],
                rate=rate,
                decay=decay,
                parameters=tuple(self._places(slice_)) if decay else (),  # for weight decay, a part of the momentum
            )

        return update

    def _places(self, slice_: Slice) -> Iterator[tuple[int, int, Tensor]]:
        start = 0
        for name, size in slice_.key:
            if name is not None:
                yield start, start + size, flat(self._parameters[name].detach())
            start += size

    def _step_by_gradients(self, piece: Piece) -> None:
        group, (_, names, parameters, gradients) = self._group_of(piece.family), piece
        momentum = group["momentum"]
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        if momentum:
            buffers = [self._moment("momentum_buffer", *named) for named in zip(names, parameters, strict=True)]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, gradients)
            gradients = list(torch._foreach_add(gradients, buffers, alpha=momentum)) if group["nesterov"] else buffers
        updates = [gradient.to(parameter.dtype) for parameter, gradient in zip(parameters, gradients, strict=True)]
        torch._foreach_add_(parameters, updates, alpha=-float(group["lr"]))

    def _to_updates(self, names: Collection[str]) -> None:
        for name in names:
            if name in self._vectors["momentum_buffer"]:
                group = self._group_of(self._families.number_of[name])
                self._vectors["momentum_buffer"][name].div_(_momentum_ratio(group))

    def _to_torch(self, name: str, moments: dict[str, Tensor]) -> None:
        moments["momentum_buffer"].mul_(_momentum_ratio(self._group_of(self._families.number_of[name])))

    def _step_by_updates(self, piece: Piece) -> None:
        torch._foreach_add_(piece.parameters, piece.tensors, alpha=-self._group_of(piece.family)["reference_lr"])


def _momentum_ratio(group: dict[str, Any]) -> float:
    """Return the factor of momentum when it is sent, so that a gradient moves weights as far in the long run."""
    return float((1 - group["compressed_momentum"]) / (1 - group["momentum"]))
