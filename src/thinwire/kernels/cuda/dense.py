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
from .launch import launch, new_flag
from .marks import mark_if
from .numbers import INFINITY_BITS, magnitude_bits, total_at

_TILE = 4096


def encode(tensor: Tensor, residual: Tensor | None, layout: DenseLayout, payload: Tensor) -> Tensor:
    """Write the payload of tensor + residual. Return a flag on the device: 1 if the sum is not finite."""
    flag = new_flag(tensor)
    values = reference.read_values(payload, layout.dtype)
    g, r = tensor.view(-1), (tensor if residual is None else residual).view(-1)
    launch(
        copy_elements, (triton.cdiv(layout.numel, _TILE),), g, r, values, flag, layout.numel, layout.limit,
        HAS_R=residual is not None, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    if values.data_ptr() != payload.data_ptr():
        payload.copy_(values.view(torch.uint8))
    mark_if(flag, payload, reference, DenseLayout(1, layout.dtype), layout.dtype.itemsize, layout.numel)
    return flag


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
