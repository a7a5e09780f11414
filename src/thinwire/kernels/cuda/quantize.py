"""Quantize on the GPU, for blocks of up to 8,192 elements, which fit into the registers of one program."""

from dataclasses import replace

import triton
from torch import Tensor

from ..layout import BLOCKS_PER_RECORD, QuantizeLayout
from ..reference import quantize as reference
from .launch import REFERENCE_DTYPES, launch, new_flag
from .marks import mark_if
from .quantize_kernels import decode_blocks, encode_blocks
from .topk_decode import ADD, KEEP, ZERO

_TILE = 4096  # Elements of a program, if a record has as many


def encode(tensor: Tensor, residual: Tensor | None, layout: QuantizeLayout, payload: Tensor) -> Tensor:
    """Write the payload of tensor + residual. Return a flag on the device: 1 if the sum is not finite."""
    flag, flat, kept = new_flag(tensor), tensor.view(-1), None if residual is None else residual.view(-1)
    rows = _rows(layout)
    for elements, part in layout.parts(layout.numel):
        g = flat[part.elements]
        r = g if kept is None else kept[part.elements]
        launch(
            encode_blocks, (triton.cdiv(g.numel(), rows * layout.block),), g, r, payload[part.nbytes], flag,
            triton.cdiv(elements, layout.block), g.numel(), layout.limit,
            BITS=layout.bits, BLOCK=layout.block, ROWS=rows, HAS_R=kept is not None,
            MASKED=elements < layout.granule, num_warps=_warps(rows * layout.block),
        )  # fmt: skip
    full, rest = divmod(layout.numel, layout.granule)
    pattern = replace(layout, numel=min(full, 1) * layout.granule + rest)
    mark_if(flag, payload, reference, pattern, layout.record_nbytes(layout.granule), full)
    return flag


def commit(tensor: Tensor, residual: Tensor, layout: QuantizeLayout, payload: Tensor) -> None:
    """Compute residual <- tensor + residual - decode(payload)."""
    _decode(payload.unsqueeze(0), layout, tensor, ADD, -1.0, residual)


def decode(payloads: Tensor, layout: QuantizeLayout, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
    if out.dtype in REFERENCE_DTYPES:
        reference.decode(payloads, layout, out, weight, add)
    else:
        _decode(payloads, layout, None, KEEP if add else ZERO, weight, out)


def _decode(payloads: Tensor, layout: QuantizeLayout, g: Tensor | None, start: int, weight: float, out: Tensor) -> None:
    flat, given = out.view(-1), out.view(-1) if g is None else g.view(-1)
    rows = _rows(layout)
    for elements, part in layout.parts(layout.numel):
        target = flat[part.elements]
        launch(
            decode_blocks, (triton.cdiv(target.numel(), rows * layout.block),), payloads[:, part.nbytes.start :],
            given[part.elements], target, payloads.stride(0), payloads.shape[0],
            triton.cdiv(elements, layout.block), target.numel(), weight,
            BITS=layout.bits, BLOCK=layout.block, ROWS=rows, START=start,
            MASKED=elements < layout.granule, num_warps=_warps(rows * layout.block),
        )  # fmt: skip


def _rows(layout: QuantizeLayout) -> int:
    return min(BLOCKS_PER_RECORD, max(1, _TILE // layout.block))


def _warps(elements: int) -> int:
    return max(1, min(8, elements // 1024))
