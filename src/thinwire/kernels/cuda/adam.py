"""Adam's update in one pass over memory (`reference.adam` defines it): 16 bytes an entry to send, 20 to commit.

`topk.compress` makes the update by itself, adds the residual, selects, packs and updates the residual in one pass: it
reads gradient, momentum, second moment and residual, and writes the update in the place of the gradient (`commit` needs
it) and the residual: 24 bytes an entry, where `send` and `topk.compress` one after the other move 28.

Divisions and roots are those of IEEE, as torch's. Float64 goes to the reference.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..reference import adam as reference
from .launch import REFERENCE_DTYPES, launch
from .update import update_of

_TILE = 4096


def send(
    g: Tensor, m: Tensor, v: Tensor, beta1: float, factor: float, scale: float, floor: float, limit: float, rate: float
) -> None:
    if g.dtype in REFERENCE_DTYPES:
        return reference.send(g, m, v, beta1, factor, scale, floor, limit, rate)
    if g.numel():
        launch(send_entries, (triton.cdiv(g.numel(), _TILE),), g, m, v, g.numel(), beta1, (1 - beta1) * factor, scale,
               floor, limit, rate, TILE=_TILE, num_warps=4)  # fmt: skip


def commit(
    u: Tensor, m: Tensor, v: Tensor, beta1: float, beta2: float, scale: float, floor: float, rate: float
) -> None:
    if u.dtype in REFERENCE_DTYPES:
        return reference.commit(u, m, v, beta1, beta2, scale, floor, rate)
    if u.numel():
        launch(commit_entries, (triton.cdiv(u.numel(), _TILE),), u, m, v, u.numel(), scale / rate, floor / rate, beta1,
               1 / (1 - beta1), beta2, 1 - beta2, FOLLOWED=beta2 < 1, TILE=_TILE, num_warps=4)  # fmt: skip


step = reference.step  # bound by the memory as it is


@triton.jit(do_not_specialize=["beta1", "gain", "scale", "floor", "limit", "rate"])
def send_entries(g_ptr, m_ptr, v_ptr, n, beta1, gain, scale, floor, limit, rate, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    g, m = tl.load(g_ptr + at, mask=at < n, other=0.0), tl.load(m_ptr + at, mask=at < n, other=0.0)
    v = tl.load(v_ptr + at, mask=at < n, other=1.0)
    tl.store(g_ptr + at, update_of(g, m, v, beta1, gain, scale, floor, limit, rate), mask=at < n)


@triton.jit(do_not_specialize=["scale", "floor", "beta1", "inverse", "beta2", "rest"])
def commit_entries(  # type: ignore[no-untyped-def]
    u_ptr, m_ptr, v_ptr, n, scale, floor, beta1, inverse, beta2, rest, FOLLOWED: tl.constexpr, TILE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    u, v = tl.load(u_ptr + at, mask=at < n, other=0.0), tl.load(v_ptr + at, mask=at < n, other=0.0)
    momentum = u * (scale * tl.sqrt_rn(v) + floor)
    if FOLLOWED:
        gradient = (momentum - beta1 * tl.load(m_ptr + at, mask=at < n, other=0.0)) * inverse
        tl.store(v_ptr + at, beta2 * v + rest * gradient * gradient, mask=at < n)
    tl.store(m_ptr + at, momentum, mask=at < n)
