"""Adam's update in one pass over memory: `write` moves 16 bytes per element, `advance` 28. `reference.adam` defines it.

Gradients of 16 bits save 2 of these bytes. Divisions and square roots are rounded correctly (IEEE 754), as torch does,
and no product is fused into a sum, so `write` and `advance` compute the same bits. The moments are float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import adam as reference
from ..updates import AdamUpdate
from .launch import launch

_TILE = 4096


def numbers_of(
    *, beta1: float, factor: float, scale: float, floor: float, limit: float, rate: float, beta2: float
) -> tuple[float, ...]:
    """Return the numbers that the kernels read. The first two are factors of the gradient."""
    return (1 - beta1) * factor, factor, beta1, scale, floor, limit, rate, beta2, 1 - beta2


def write(update: AdamUpdate, gradient: Tensor, out: Tensor) -> None:
    """Write the update to `out`."""
    n = gradient.numel()
    if n:
        launch(write_elements, (triton.cdiv(n, _TILE),), gradient, update.m, update.v, out, _on_device(update), n,
               TILE=_TILE, num_warps=4)  # fmt: skip


def advance(update: AdamUpdate, gradient: Tensor, residual: Tensor | None) -> None:
    """Advance the moments, and add the update to the residual."""
    n = gradient.numel()
    if n:
        kept = update.m if residual is None else residual
        launch(advance_elements, (triton.cdiv(n, _TILE),), gradient, update.m, update.v, kept, _on_device(update), n,
               HAS_R=residual is not None, FOLLOWED=update.beta2 < 1, TILE=_TILE, num_warps=4)  # fmt: skip


def step(parameters: list[Tensor], updates: list[Tensor], keep: float | Tensor, rates: list[Any]) -> None:
    """Compute p <- keep p - rate u; from numbers on the device, as a recording needs, by one kernel per parameter."""
    if not isinstance(keep, Tensor):
        reference.step(parameters, updates, keep, rates)  # bound by the memory as it is
        return
    for parameter, update, rate in zip(parameters, updates, rates, strict=True):
        n = parameter.numel()
        if n:
            launch(step_elements, (triton.cdiv(n, _TILE),), parameter, update, keep, rate, n, TILE=_TILE, num_warps=4)


def _on_device(update: AdamUpdate) -> Tensor:
    if update.on_device is not None:
        return update.on_device
    names = ("beta1", "factor", "scale", "floor", "limit", "rate", "beta2")
    numbers = numbers_of(**{name: getattr(update, name) for name in names})
    device = update.m.device
    return torch.tensor(numbers, dtype=torch.float32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@triton.jit
def update_of(own, momentum, v, scale, floor, limit, rate):
    """Return rate * momentum / (scale sqrt(v) + floor), cut to ±limit before the rate. Inf and NaN stay.

    If `own` is so large that its square would be infinite, the result is ±Inf.
    """
    update = tl.div_rn(momentum, scale * tl.sqrt_rn(v) + floor)
    cut = tl.where(update > 0, limit, -limit)
    magnitude = tl.abs(update)
    sent = rate * tl.where((magnitude > limit) & (magnitude < float("inf")), cut, update)
    infinite = tl.where(own > 0, float("inf"), -float("inf"))
    return tl.where(tl.abs(own) > 1.8446743e19, infinite, sent)


@triton.jit
def write_elements(g_ptr, m_ptr, v_ptr, out_ptr, numbers_ptr, n, TILE: tl.constexpr):
    """Write the update of TILE elements to `out`."""
    gain, beta1 = tl.load(numbers_ptr), tl.load(numbers_ptr + 2)
    scale, floor = tl.load(numbers_ptr + 3), tl.load(numbers_ptr + 4)
    limit, rate = tl.load(numbers_ptr + 5), tl.load(numbers_ptr + 6)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    own = gain * tl.load(g_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    momentum = own + beta1 * tl.load(m_ptr + at, mask=at < n, other=0.0)
    v = tl.load(v_ptr + at, mask=at < n, other=1.0)
    tl.store(out_ptr + at, update_of(own, momentum, v, scale, floor, limit, rate), mask=at < n)


@triton.jit
def advance_elements(
    g_ptr, m_ptr, v_ptr, r_ptr, numbers_ptr, n, HAS_R: tl.constexpr, FOLLOWED: tl.constexpr, TILE: tl.constexpr
):
    """Advance the moments of TILE elements (v only if FOLLOWED), and add the update to the residual if HAS_R."""
    gain, factor, beta1 = tl.load(numbers_ptr), tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
    scale, floor = tl.load(numbers_ptr + 3), tl.load(numbers_ptr + 4)
    limit, rate = tl.load(numbers_ptr + 5), tl.load(numbers_ptr + 6)
    beta2, rest = tl.load(numbers_ptr + 7), tl.load(numbers_ptr + 8)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    g = tl.load(g_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    own = gain * g
    momentum = own + beta1 * tl.load(m_ptr + at, mask=at < n, other=0.0)
    if HAS_R or FOLLOWED:
        v = tl.load(v_ptr + at, mask=at < n, other=1.0)
        if HAS_R:
            r = tl.load(r_ptr + at, mask=at < n, other=0.0)
            tl.store(r_ptr + at, r + update_of(own, momentum, v, scale, floor, limit, rate), mask=at < n)
        if FOLLOWED:
            gradient = factor * g
            tl.store(v_ptr + at, beta2 * v + rest * gradient * gradient, mask=at < n)
    tl.store(m_ptr + at, momentum, mask=at < n)


@triton.jit
def step_elements(p_ptr, u_ptr, keep_ptr, rate_ptr, n, TILE: tl.constexpr):
    """Compute p <- keep p - rate u for TILE elements."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    p = tl.load(p_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    moved = tl.load(keep_ptr) * p - tl.load(rate_ptr) * tl.load(u_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(p_ptr + at, moved.to(p_ptr.dtype.element_ty), mask=at < n)
