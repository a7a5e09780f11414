"""AdamW whose update, not whose gradient, is compressed.

Error feedback delivers an entry late and in lumps. In the gradient that ruins Adam: its second moment sees the lumps.
So each rank makes its update, momentum / sqrt(second moment), from its own gradients, and that is what is compressed.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch import Tensor

from .. import kernels
from ..buckets import Run
from ..policy import Policy, Spec
from .base import CompressedOptimizer
from .settings import checked, policy_of


class AdamW(CompressedOptimizer):
    moments = ("exp_avg", "exp_avg_sq")
    local_moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.8, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        compressor: Spec | Policy = "topk:ratio=1/64,bits=2",
        warmup_steps: int = 100,
        warmup: Spec = "quantize:bits=8",
        max_grad_norm: float | None = None,
        ddp: Any = None,
        group: Any = None,
        algorithm: str = "auto",
        second: Spec | None = None,
        grad_scaler: Any = None,
        max_bytes: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        checked("lr", lr, 0.0, float("inf"))
        checked("beta1", betas[0], 0.0, 1.0)
        checked("beta2", betas[1], 0.0, 1.0)
        checked("eps", eps, 0.0, float("inf"))
        checked("weight_decay", weight_decay, 0.0, float("inf"))
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, policy_of(compressor, warmup_steps, warmup), ddp=ddp, max_grad_norm=max_grad_norm,
            grad_scaler=grad_scaler, group=group, algorithm=algorithm, second=second, max_bytes=max_bytes,
            timeout=timeout,
        )  # fmt: skip
        self._squares = 0
        """Gradients that the second moment is made of."""

    def _send(self, run: Run, tensor: Tensor, group: dict[str, Any], factor: float) -> None:
        """update = (beta1 m + (1 - beta1) gradient) / denominator"""
        m, v = self._moments_of(run, tensor)
        beta1, (scale, floor) = group["betas"][0], self._divisor(group)
        update = tensor.to(m.dtype)  # the same tensor, unless it is of 16 bits
        kernels.adam(tensor.device).send(update, m, v, beta1, (1 - beta1) * factor, scale, floor)
        if update is not tensor:
            tensor.copy_(update)

    def _commit(self, run: Run, tensor: Tensor, group: dict[str, Any]) -> None:
        m, v = self._moments_of(run, tensor)
        kernels.adam(tensor.device).commit(tensor.to(m.dtype), m, v, *self._divisor(group))

    def _divisor(self, group: dict[str, Any]) -> tuple[float, float]:
        """(scale, floor): momentum is divided by sqrt(v) scale + floor, with the corrections for a short past."""
        beta1, beta2 = group["betas"]
        first, second = 1 - beta1 ** (self._count + 1), 1 - beta2 ** max(1, self._squares)
        return first / second**0.5, first * group["eps"]

    def _step_by_gradient(self, group: dict[str, Any], name: str, parameter: Tensor, gradient: Tensor) -> None:
        """torch's AdamW, operation by operation."""
        beta1, beta2 = group["betas"]
        m, v = (self._moment(kind, name, parameter) for kind in self.moments)
        parameter.mul_(1 - float(group["lr"]) * group["weight_decay"])
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first, second = 1 - beta1**self._count, 1 - beta2**self._count
        denominator = (v.sqrt() / second**0.5).add_(group["eps"])
        if parameter.dtype == m.dtype:
            parameter.addcdiv_(m, denominator, value=-float(group["lr"]) / first)
        else:
            parameter.sub_((m / denominator).mul_(float(group["lr"]) / first).to(parameter.dtype))

    def _step_by_update(self, group: dict[str, Any], parameter: Tensor, update: Tensor) -> None:
        parameter.mul_(1 - float(group["lr"]) * group["weight_decay"])
        parameter.add_(update, alpha=-float(group["lr"]))

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "squares": self._squares}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        super()._load_own_state(state)
        self._squares = int(state["squares"])

    def _counts(self, as_gradients: bool) -> None:
        self._squares += as_gradients
