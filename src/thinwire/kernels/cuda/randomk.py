"""RandomK on the GPU: one element from each stratum. `reference.randomk` defines the draw.

`encode` reads gradient and residual once, 8 bytes per element, only to check that they are finite. Drawing the k
elements costs almost nothing in addition. `commit` is `residual.add_(tensor)` and a correction of k elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import DenseLayout, RandomKLayout
from ..reference import randomk as reference
from ..reference.dense import read_values
from .launch import REFERENCE_DTYPES, launch, waiting_for
from .marks import add_unless, mark_if
from .numbers import INFINITY_BITS, draw, magnitude_bits, total_at

_TILE = 4096
_STRATA = 256


def encode_flagged(
    tensor: Tensor, residual: Tensor | None, layout: RandomKLayout, key: int, payload: Tensor, flag: Tensor
) -> None:
    """Encode without waiting for the device. The flag, an int32 that was 0, becomes 1 if the input was not finite."""
    has_r = residual is not None
    g, r = tensor.view(-1), (tensor if residual is None else residual).view(-1)
    tiles = triton.cdiv(layout.numel, _TILE)
    launch(find_not_finite, (tiles,), g, r, flag, layout.numel, HAS_R=has_r, TILE=_TILE, num_warps=4)
    values = torch.empty(layout.k, dtype=torch.float32, device=tensor.device)
    launch(
        gather_strata, (triton.cdiv(layout.k, _STRATA),), g, r, values, *_strata(layout, key),
        HAS_R=has_r, STRATA=_STRATA, num_warps=4,
    )  # fmt: skip
    reference.write(values.masked_fill(flag != 0, 0), layout, payload)
    mark_if(flag, payload, reference, DenseLayout(1, layout.dtype), layout.dtype.itemsize, layout.k)


encode = waiting_for(encode_flagged)


def compress(tensor: Tensor, residual: Tensor, layout: RandomKLayout, key: int, payload: Tensor, flag: Tensor) -> None:
    """Encode and commit. The flag, an int32 on the device, is 1 afterwards if the input was not finite, else 0."""
    flag.zero_()
    encode_flagged(tensor, residual, layout, key, payload, flag)
    values = read_values(payload.unsqueeze(0), layout.dtype)
    launch(add_unless, (triton.cdiv(layout.numel, _TILE),), residual.view(-1), tensor.view(-1), flag, layout.numel,
           TILE=_TILE, num_warps=4)  # fmt: skip
    launch(
        add_strata, (triton.cdiv(layout.k, _STRATA),), values, residual.view(-1), flag, 1, values.stride(0), -1.0,
        *_strata(layout, key), GUARDED=True, STRATA=_STRATA, num_warps=4,
    )  # fmt: skip


def commit(tensor: Tensor, residual: Tensor, layout: RandomKLayout, key: int, payload: Tensor) -> None:
    """Compute residual <- tensor + residual - decode(payload)."""
    residual.add_(tensor)
    decode(payload.unsqueeze(0), layout, key, residual, -1.0, True)


def decode(payloads: Tensor, layout: RandomKLayout, key: int, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
    if out.dtype in REFERENCE_DTYPES:
        return reference.decode(payloads, layout, key, out, weight, add)
    if not add:
        out.zero_()
    values = read_values(payloads, layout.dtype)
    launch(
        add_strata, (triton.cdiv(layout.k, _STRATA),), values, out.view(-1), payloads, payloads.shape[0],
        values.stride(0), weight, *_strata(layout, key), GUARDED=False, STRATA=_STRATA, num_warps=4,
    )  # fmt: skip


def _strata(layout: RandomKLayout, key: int) -> tuple[int, int, int, int]:
    """Return (k, width, number of strata that are one element wider, key as a signed integer)."""
    return layout.k, *divmod(layout.numel, layout.k), key - (1 << 64) if key >> 63 else key


@triton.jit
def place_in(stratum, width, wider, key):
    """Return (the position drawn in each stratum, the width of the stratum)."""
    start = stratum * width + tl.minimum(stratum, wider)
    mine = width + (stratum < wider).to(tl.int64)
    return start + ((draw(key, stratum) >> 32) * mine >> 31), mine


@triton.jit
def find_not_finite(g_ptr, r_ptr, flag_ptr, n, HAS_R: tl.constexpr, TILE: tl.constexpr):
    """Set the flag if one of TILE elements of g + r is not finite."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = total_at(g_ptr, r_ptr, at, n, HAS_R)
    if tl.max(magnitude_bits(total), axis=0) >= INFINITY_BITS:
        tl.store(flag_ptr, 1)


@triton.jit(do_not_specialize=["k", "width", "wider", "key"])
def gather_strata(g_ptr, r_ptr, values_ptr, k, width, wider, key, HAS_R: tl.constexpr, STRATA: tl.constexpr):
    """Write the drawn elements: g + r or, without a residual, g times the width of the stratum, which is unbiased."""
    stratum = tl.program_id(0).to(tl.int64) * STRATA + tl.arange(0, STRATA)
    at, mine = place_in(stratum, width, wider, key)
    value = tl.load(g_ptr + at, mask=stratum < k, other=0.0).to(tl.float32)
    value = value + tl.load(r_ptr + at, mask=stratum < k, other=0.0) if HAS_R else value * mine.to(tl.float32)
    tl.store(values_ptr + stratum, value, mask=stratum < k)


@triton.jit(do_not_specialize=["payloads", "stride", "weight", "k", "width", "wider", "key"])
def add_strata(
    values_ptr, out_ptr, flag_ptr, payloads, stride, weight, k, width, wider, key,
    GUARDED: tl.constexpr, STRATA: tl.constexpr,
):  # fmt: skip
    """Compute out += weight * each payload at the drawn positions. GUARDED: does nothing if the flag is set."""
    stratum = tl.program_id(0).to(tl.int64) * STRATA + tl.arange(0, STRATA)
    if GUARDED:
        k = tl.where(tl.load(flag_ptr) == 0, k, 0)
    at, _ = place_in(stratum, width, wider, key)
    total = tl.load(out_ptr + at, mask=stratum < k, other=0.0).to(tl.float32)
    p = 0 * payloads
    while p < payloads:
        value = tl.load(values_ptr + p.to(tl.int64) * stride + stratum, mask=stratum < k, other=0.0)
        total += value.to(tl.float32) * weight
        p += 1
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=stratum < k)
