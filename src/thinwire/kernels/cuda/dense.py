"""Every element as it is, without waiting for the device. `reference.dense` defines the payload, and decodes it.

Encoding is a copy that also looks for NaN and Inf: 8 bytes per element for float32, 12 with a residual. Updating the
residual takes another 16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import DenseLayout
from ..reference import dense as reference
from .launch import launch, waiting_for
from .marks import mark_if
from .numbers import INFINITY_BITS, magnitude_bits, total_at

_TILE = 4096


def encode_flagged(
    tensor: Tensor, residual: Tensor | None, layout: DenseLayout, key: int, payload: Tensor, flag: Tensor
) -> None:
    """Encode without waiting for the device. The flag, an int32 that was 0, becomes 1 if the input was not finite."""
    values = reference.read_values(payload, layout.dtype)
    g, r = tensor.view(-1), (tensor if residual is None else residual).view(-1)
    launch(
        copy_elements, (triton.cdiv(layout.numel, _TILE),), g, r, values, flag, layout.numel, layout.limit,
        HAS_R=residual is not None, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    if values.data_ptr() != payload.data_ptr():
        payload.copy_(values.view(torch.uint8))
    mark_if(flag, payload, reference, DenseLayout(1, layout.dtype), layout.dtype.itemsize, layout.numel)


encode = waiting_for(encode_flagged)


def compress(tensor: Tensor, residual: Tensor, layout: DenseLayout, key: int, payload: Tensor, flag: Tensor) -> None:
    """Encode and commit. The flag, an int32 on the device, is 1 afterwards if the input was not finite, else 0."""
    flag.zero_()
    encode_flagged(tensor, residual, layout, key, payload, flag)
    launch(
        keep_rest, (triton.cdiv(layout.numel, _TILE),), tensor.view(-1), residual.view(-1),
        reference.read_values(payload, layout.dtype), flag, layout.numel, TILE=_TILE, num_warps=4,
    )  # fmt: skip


commit, decode = reference.commit, reference.decode


@triton.jit(do_not_specialize=["limit"])
def copy_elements(g_ptr, r_ptr, out_ptr, flag_ptr, n, limit, HAS_R: tl.constexpr, TILE: tl.constexpr):
    """Write TILE elements of g + r, cut to ±limit, and set the flag if one is not finite."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = total_at(g_ptr, r_ptr, at, n, HAS_R)
    if tl.max(magnitude_bits(total), axis=0) >= INFINITY_BITS:
        tl.store(flag_ptr, 1)
    cut = tl.minimum(tl.maximum(total, -limit), limit)
    tl.store(out_ptr + at, cut.to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def keep_rest(g_ptr, r_ptr, sent_ptr, flag_ptr, n, TILE: tl.constexpr):
    """Compute r <- r + g - sent, unless the flag is set."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (at < n) & (tl.load(flag_ptr) == 0)
    kept = tl.load(r_ptr + at, mask=inside, other=0.0)
    kept += tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    kept -= tl.load(sent_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(r_ptr + at, kept, mask=inside)
