"""Adam's update in plain torch, block by block. The gradient is only read; `advance` updates the moments.

    own = (1 - beta1) factor g;   momentum = own + beta1 m;   u = momentum / (sqrt(v) scale + floor), cut to ±limit

    write     out <- rate u
    advance   residual <- residual + rate u;   v <- beta2 v + (1 - beta2) (factor g)^2;   m <- momentum
    step      p <- keep p - rate u, for many parameters, each with its own rate
    step_by_gradients   the step of torch's AdamW, from averaged gradients

`advance` computes the update from the old moments, with the same bits as `write`. The sent part is subtracted from the
residual afterwards, and the rest must be exactly the part that was not sent. The moments follow the gradient itself,
not the cut update. With beta2 = 1 the second moment does not change. Without a residual only the moments change. A
gradient of another dtype is first converted to the dtype of the moments. Inf and NaN are not cut, so that the
compressor finds them. Where `own` is so large that its square would be infinite, the update is also Inf.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..updates import AdamUpdate

_BLOCK = 1 << 22  # Elements in a block. Temporary tensors stay this small


def largest(dtype: torch.dtype) -> float:
    """Return the largest number whose square is finite."""
    return float(torch.finfo(dtype).max ** 0.5)


def write(update: AdamUpdate, gradient: Tensor, out: Tensor) -> None:
    """Write the update to `out`."""
    for g, m, v, out_part in _blocks(gradient, update.m, update.v, out):
        out_part.copy_(_update_and_momentum(update, g=g, m=m, v=v)[0])


def advance(update: AdamUpdate, gradient: Tensor, residual: Tensor | None) -> None:
    """Advance the moments, and add the update to the residual."""
    for g, m, v, kept in _blocks(gradient, update.m, update.v, residual):
        change, momentum = _update_and_momentum(update, g=g, m=m, v=v)
        if kept is not None:
            kept.add_(change)
        if update.beta2 < 1:
            scaled = g.to(m.dtype) * update.factor
            v.mul_(update.beta2).addcmul_(scaled, scaled, value=1 - update.beta2)
        m.copy_(momentum)


def _blocks(first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    flat = [None if tensor is None else tensor.view(-1) for tensor in (first, *others)]
    for start in range(0, first.numel(), _BLOCK):
        yield tuple(None if each is None else each[start : start + _BLOCK] for each in flat)


def _update_and_momentum(update: AdamUpdate, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    own = g.to(m.dtype) * ((1 - update.beta1) * update.factor)
    momentum = own.add(m, alpha=update.beta1)
    change = momentum / v.sqrt().mul_(update.scale).add_(update.floor)
    change = torch.where(change.isinf(), change, change.clamp(-update.limit, update.limit)).mul_(update.rate)
    return torch.where(own.abs() > largest(m.dtype), own.sign() * torch.inf, change), momentum


def step(parameters: list[Tensor], updates: list[Tensor], keep: float, rates: list[float]) -> None:
    """Compute p <- keep p - rate u for every parameter p and its update u."""
    torch._foreach_mul_(parameters, keep)
    if len(set(rates)) == 1:
        torch._foreach_add_(parameters, updates, alpha=-rates[0])
        return
    for parameter, update, rate in zip(parameters, updates, rates, strict=True):
        parameter.add_(update, alpha=-rate)


def step_by_gradients(
    parameters: list[Tensor], gradients: list[Tensor], m: list[Tensor], v: list[Tensor], *,
    steps: float | Tensor, lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """Take the step of torch's AdamW, number `steps`; each operation handles all parameters: they are many and small.

    If `steps` and `lr` are tensors, torch's fused kernel reads them where they are. All tensors are float32 then.
    """
    beta1, beta2 = betas
    if isinstance(steps, Tensor):
        torch._fused_adamw_(
            parameters, gradients, m, v, [], [steps] * len(parameters), lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        return
    torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_lerp_(m, gradients, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
    first, second = 1 - beta1**steps, 1 - beta2**steps
    denominators = torch._foreach_sqrt(v)
    torch._foreach_div_(denominators, second**0.5)
    torch._foreach_add_(denominators, eps)
    rate = lr / first
    vectors = list(zip(parameters, m, denominators, strict=True))
    wide = [each for each in vectors if each[0].dtype == each[1].dtype]
    if wide:
        torch._foreach_addcdiv_([p for p, _, _ in wide], [m for _, m, _ in wide], [d for *_, d in wide], -rate)
    for parameter, momentum, denominator in vectors:
        if parameter.dtype != momentum.dtype:
            parameter.sub_((momentum / denominator).mul_(rate).to(parameter.dtype))
