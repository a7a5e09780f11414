"""Adam's update in the place of the gradient, and its momentum from the update: plain torch, block by block.

    send      u = (beta1 m + (1 - beta1) factor g) / (sqrt(v) scale + floor), cut to at most `limit`;   g <- rate u
    commit    m' = u (sqrt(v) scale + floor);   v <- beta2 v + (1 - beta2) ((m' - beta1 m) / (1 - beta1))^2;   m <- m'
    step      p <- keep p - rate u, for many parameters, each with its own rate

`commit` works out momentum and gradient again from what `send` left, so that nothing has to be kept between the two,
and nothing changes if a step is skipped. With beta2 = 1 the second moment stays as it is. Inf is not cut, but left for
the compressor to find; a gradient so large that its square would be infinite becomes Inf, too.
"""

import torch
from torch import Tensor

_BLOCK = 1 << 22
"""Entries at a time: the temporary tensors stay this small."""


def largest(dtype: torch.dtype) -> float:
    """Return the largest number whose square is finite."""
    return float(torch.finfo(dtype).max ** 0.5)


def send(
    g: Tensor, m: Tensor, v: Tensor, beta1: float, factor: float, scale: float, floor: float, limit: float, rate: float
) -> None:
    for g_part, m_part, v_part in zip(g.split(_BLOCK), m.split(_BLOCK), v.split(_BLOCK), strict=True):
        own = g_part.mul_((1 - beta1) * factor).clone()
        g_part.add_(m_part, alpha=beta1).div_(v_part.sqrt().mul_(scale).add_(floor))
        torch.where(g_part.isinf(), g_part, g_part.clamp(-limit, limit), out=g_part)
        g_part.mul_(rate)
        torch.where(own.abs() > largest(g.dtype), own.sign() * torch.inf, g_part, out=g_part)


def commit(
    u: Tensor, m: Tensor, v: Tensor, beta1: float, beta2: float, scale: float, floor: float, rate: float
) -> None:
    for u_part, m_part, v_part in zip(u.split(_BLOCK), m.split(_BLOCK), v.split(_BLOCK), strict=True):
        momentum = v_part.sqrt().mul_(scale).add_(floor).mul_(u_part).div_(rate)
        if beta2 < 1:
            gradient = (momentum - beta1 * m_part).div_(1 - beta1)
            v_part.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        m_part.copy_(momentum)


def step(parameters: list[Tensor], updates: list[Tensor], keep: float, rates: list[float]) -> None:
    torch._foreach_mul_(parameters, keep)
    if len(set(rates)) == 1:
        torch._foreach_add_(parameters, updates, alpha=-rates[0])
        return
    for parameter, update, rate in zip(parameters, updates, rates, strict=True):
        parameter.add_(update, alpha=-rate)
