"""Adam's update in one pass over memory (`reference.adam` defines it): 16 bytes an entry to write, 28 to advance.

Gradients of 16 bits save 2 of these. Divisions and roots are those of IEEE, as torch's, and no product is fused into a
sum: `write` and `advance` make the same bits. Moments in float64 go to the reference.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..reference import adam as reference
from .launch import REFERENCE_DTYPES, launch

_TILE = 4096


def write(
    g: Tensor, m: Tensor, v: Tensor, beta1: float, factor: float, scale: float, floor: float, limit: float, rate: float,
    out: Tensor,
) -> None:  # fmt: skip
    if m.dtype in REFERENCE_DTYPES:
        return reference.write(g, m, v, beta1, factor, scale, floor, limit, rate, out)
    if g.numel():
        launch(write_entries, (triton.cdiv(g.numel(), _TILE),), g, m, v, out, g.numel(), beta1, (1 - beta1) * factor,
               scale, floor, limit, rate, TILE=_TILE, num_warps=4)  # fmt: skip


def advance(
    g: Tensor, m: Tensor, v: Tensor, residual: Tensor | None, beta1: float, beta2: float, factor: float, scale: float,
    floor: float, limit: float, rate: float,
) -> None:  # fmt: skip
    if m.dtype in REFERENCE_DTYPES:
        return reference.advance(g, m, v, residual, beta1, beta2, factor, scale, floor, limit, rate)
    if g.numel():
        kept = m if residual is None else residual
        launch(advance_entries, (triton.cdiv(g.numel(), _TILE),), g, m, v, kept, g.numel(), beta1, (1 - beta1) * factor,
               scale, floor, limit, rate, factor, beta2, 1 - beta2, HAS_R=residual is not None, FOLLOWED=beta2 < 1,
               TILE=_TILE, num_warps=4)  # fmt: skip


step = reference.step  # bound by the memory as it is


@triton.jit
def update_of(own, momentum, v, scale, floor, limit, rate):  # type: ignore[no-untyped-def]
    """rate * momentum / (scale sqrt(v) + floor), cut to ±limit before the rate. Inf and NaN stay.

    What is so large that its square would be infinite becomes Inf.
    """
    update = tl.div_rn(momentum, scale * tl.sqrt_rn(v) + floor)
    cut = tl.where(update > 0, limit, -limit)
    magnitude = tl.abs(update)
    sent = rate * tl.where((magnitude > limit) & (magnitude < float("inf")), cut, update)
    infinite = tl.where(own > 0, float("inf"), -float("inf"))
    return tl.where(tl.abs(own) > 1.8446743e19, infinite, sent)


@triton.jit(do_not_specialize=["beta1", "gain", "scale", "floor", "limit", "rate"])
def write_entries(  # type: ignore[no-untyped-def]
    g_ptr, m_ptr, v_ptr, out_ptr, n, beta1, gain, scale, floor, limit, rate, TILE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    own = gain * tl.load(g_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    momentum = own + beta1 * tl.load(m_ptr + at, mask=at < n, other=0.0)
    v = tl.load(v_ptr + at, mask=at < n, other=1.0)
    tl.store(out_ptr + at, update_of(own, momentum, v, scale, floor, limit, rate), mask=at < n)


@triton.jit(do_not_specialize=["beta1", "gain", "scale", "floor", "limit", "rate", "factor", "beta2", "rest"])
def advance_entries(  # type: ignore[no-untyped-def]
    g_ptr, m_ptr, v_ptr, r_ptr, n, beta1, gain, scale, floor, limit, rate, factor, beta2, rest,
    HAS_R: tl.constexpr, FOLLOWED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
