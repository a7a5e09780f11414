"""Adam's update in plain torch, block by block. The gradient is only read; `advance` updates the moments.

    own = (1 - beta1) factor g;   momentum = own + beta1 m;   u = momentum / (sqrt(v) scale + floor), cut to ±limit

    write     out <- rate u
    advance   residual <- residual + rate u;   v <- beta2 v + (1 - beta2) (factor g)^2;   m <- momentum
    step      p <- keep p - rate u, for many parameters, each with its own rate

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

_BLOCK = 1 << 22
"""Elements in a block. Temporary tensors stay this small."""


def largest(dtype: torch.dtype) -> float:
    """Return the largest number whose square is finite."""
    return float(torch.finfo(dtype).max ** 0.5)


def write(
    g: Tensor, m: Tensor, v: Tensor, beta1: float, factor: float, scale: float, floor: float, limit: float, rate: float,
    out: Tensor,
) -> None:  # fmt: skip
    """Write the update to `out`."""
    for g_part, m_part, v_part, out_part in _blocks(g, m, v, out):
        out_part.copy_(_update_of(g_part, m_part, v_part, beta1, factor, scale, floor, limit, rate)[0])


def advance(
    g: Tensor, m: Tensor, v: Tensor, residual: Tensor | None, beta1: float, beta2: float, factor: float, scale: float,
    floor: float, limit: float, rate: float,
) -> None:  # fmt: skip
    """Advance the moments, and add the update to the residual."""
    for g_part, m_part, v_part, kept in _blocks(g, m, v, residual):
        update, momentum = _update_of(g_part, m_part, v_part, beta1, factor, scale, floor, limit, rate)
        if kept is not None:
            kept.add_(update)
        if beta2 < 1:
            gradient = g_part.to(m.dtype) * factor
            v_part.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        m_part.copy_(momentum)


def _blocks(first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield the same block of elements of every tensor. None stays None."""
    flat = [None if tensor is None else tensor.view(-1) for tensor in (first, *others)]
    for start in range(0, first.numel(), _BLOCK):
        yield tuple(None if each is None else each[start : start + _BLOCK] for each in flat)


def _update_of(
    g: Tensor, m: Tensor, v: Tensor, beta1: float, factor: float, scale: float, floor: float, limit: float, rate: float
) -> tuple[Tensor, Tensor]:
    """Return (update, momentum) of some elements."""
    own = g.to(m.dtype) * ((1 - beta1) * factor)
    momentum = own.add(m, alpha=beta1)
    update = momentum / v.sqrt().mul_(scale).add_(floor)
    update = torch.where(update.isinf(), update, update.clamp(-limit, limit)).mul_(rate)
    return torch.where(own.abs() > largest(m.dtype), own.sign() * torch.inf, update), momentum


def step(parameters: list[Tensor], updates: list[Tensor], keep: float, rates: list[float]) -> None:
    """Compute p <- keep p - rate u for every parameter p and its update u."""
    torch._foreach_mul_(parameters, keep)
    if len(set(rates)) == 1:
        torch._foreach_add_(parameters, updates, alpha=-rates[0])
        return
    for parameter, update, rate in zip(parameters, updates, rates, strict=True):
        parameter.add_(update, alpha=-rate)
