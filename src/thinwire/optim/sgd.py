"""SGD that compresses each rank's momentum instead of its gradient (Lin et al. 2018: momentum correction)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..kernels.updates import MomentumUpdate
from ..sync.buckets import Run, flat
from ..sync.policy import DEFAULT, Policy, Spec
from ..sync.step import Step
from .base import CompressedOptimizer
from .settings import checked, policy_of

_COMPRESSED_MOMENTUM = 0.5


@dataclass(frozen=True)
class MomentumRule:
    """The numbers of `MomentumUpdate`, for one parameter group at one step."""

    momentum: float
    nesterov: bool
    rate: float
    decay: float
    parameters: Mapping[str, Tensor]
    """Parameters by name, for weight decay, which is part of the momentum."""

    def update(self, run: Run, moments: Sequence[Tensor], factor: float) -> MomentumUpdate:
        """Return the update of a run, whose gradient is first multiplied by `factor`."""
        return MomentumUpdate(
            moments[0] if self.momentum else None,
            self.momentum,
            factor,
            self.nesterov,
            self.rate,
            self.decay,
            tuple(self._places(run)) if self.decay else (),
        )

    def _places(self, run: Run) -> Iterator[tuple[int, int, Tensor]]:
        start = 0
        for name, size in run.key:
            if name is not None:
                yield start, start + size, flat(self.parameters[name].detach())
            start += size


class SGD(CompressedOptimizer):
    """SGD for slow networks: it exchanges compressed momentum instead of gradients.

    params         a DDP model (exchanges overlap with the backward pass), another module, or parameters or groups of
                   them as for any optimizer. Parameters of a DDP model need `ddp` too. Without DDP, `step` exchanges.
    lr, momentum, weight_decay, nesterov   as in torch. `momentum` applies to everything that is sent as a gradient: the
                   warm-up, and small and excluded tensors.
    compressed_momentum  the momentum of compressed updates; by default `momentum`, but 0.5 at most: error feedback
                   delays an element, which acts as momentum by itself. Updates are multiplied by
                   (1 - compressed_momentum) / (1 - momentum), so that a gradient moves the weights as far in the long
                   run as with torch's SGD: by lr / (1 - momentum).
    compressor     a spec, a `Compressor` or a `Policy` with all its rules. "default" is a top-k that keeps less of each
                   rank with more ranks (`default_compressor`). "auto" chooses dense, 8 bits or top-k for each bucket,
                   by the times of the first steps; `sync.choice` contains the reason.
    warmup_steps   number of steps that send gradients, compressed by `warmup`, and do the same as torch's SGD.
    max_grad_norm  the gradient of each rank is clipped to this times the square root of the number of ranks.
    grad_scaler    the `GradScaler` in use, if any.
    group, algorithm, shard_compressor, max_bytes, timeout   as for `Synchronizer`.
    """

    moments = ("momentum_buffer",)
    local_moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        compressed_momentum: float | None = None,
        compressor: Spec | Policy = DEFAULT,
        warmup_steps: int = 0,
        warmup: Spec = "quantize:bits=8",
        max_grad_norm: float | None = None,
        ddp: Any = None,
        group: Any = None,
        algorithm: str = "auto",
        shard_compressor: Spec | None = None,
        grad_scaler: Any = None,
        max_bytes: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        checked("lr", lr, 0.0, float("inf"))
        checked("momentum", momentum, 0.0, 1.0)
        checked("weight_decay", weight_decay, 0.0, float("inf"))
        if nesterov and not momentum:
            raise ValueError("nesterov with momentum 0, expected a momentum above 0")
        if compressed_momentum is not None:
            checked("compressed_momentum", compressed_momentum, 0.0, 1.0)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "compressed_momentum": compressed_momentum,
        }
        super().__init__(
            params, defaults, policy_of(compressor, warmup_steps, warmup), ddp=ddp, max_grad_norm=max_grad_norm,
            grad_scaler=grad_scaler, group=group, algorithm=algorithm,
            shard_compressor=shard_compressor, max_bytes=max_bytes, timeout=timeout,
        )  # fmt: skip
        for group in self.param_groups:
            if group["compressed_momentum"] is None:
                group["compressed_momentum"] = min(float(group["momentum"]), _COMPRESSED_MOMENTUM)

    def _rule(self, group: dict[str, Any]) -> "MomentumRule":
        return MomentumRule(
            group["compressed_momentum"],
            group["nesterov"],
            self._rate(group) * _momentum_ratio(group),
            group["weight_decay"],
            self._parameters,
        )

    def _step_by_gradients(
        self, group: dict[str, Any], names: list[str], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
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

    def _after_step(self, sent: Step) -> None:
        if sent.warms_up and not self._warms_up(self.sync.steps):
            self._to_updates(self._sent_as_updates(self.sync.steps))

    def _to_updates(self, names: Collection[str]) -> None:
        for name in names:
            if name in self._vectors["momentum_buffer"]:
                group = self.param_groups[self._families[name]]
                self._vectors["momentum_buffer"][name].div_(_momentum_ratio(group))

    def _to_gradient(self, name: str) -> None:
        group = self.param_groups[self._families[name]]
        if name in self._vectors["momentum_buffer"]:
            self._vectors["momentum_buffer"][name].mul_(_momentum_ratio(group))

    def _add(self, group: dict[str, Any], name: str, parameter: Tensor, update: Tensor) -> None:
        self._step_by_updates(group, [name], [parameter], [update])

    def _step_by_updates(
        self, group: dict[str, Any], names: list[str], parameters: list[Tensor], updates: list[Tensor]
    ) -> None:
        torch._foreach_add_(parameters, updates, alpha=-group["reference_lr"])


def _momentum_ratio(group: dict[str, Any]) -> float:
    """Return the factor of momentum when it is sent, so that a gradient moves weights as far in the long run."""
    return float((1 - group["compressed_momentum"]) / (1 - group["momentum"]))
