"""Quantize on the GPU, for blocks of up to 8,192 elements, which fit into the registers of one program."""

from dataclasses import replace

import triton
from torch import Tensor

from ..layout import BLOCKS_PER_RECORD, QuantizeLayout
from ..reference import quantize as reference
from .launch import GUARDS, REFERENCE_DTYPES, launch, waiting_for
from .marks import mark_if
from .quantize_kernels import decode_blocks, encode_blocks
from .topk_decode import ADD, KEEP, SUBTRACT, ZERO

_TILE = 4096
"""Elements of a program, if a record has as many."""


def encode_flagged(
    tensor: Tensor, residual: Tensor | None, layout: QuantizeLayout, key: int, payload: Tensor, flag: Tensor
) -> None:
    """Encode without waiting for the device. The flag, an int32 that was 0, becomes 1 if the input was not finite."""
    _encode(tensor, residual, layout, key, payload, flag, update=False)
    _mark(layout, payload, flag)


encode = waiting_for(encode_flagged)


def compress(tensor: Tensor, residual: Tensor, layout: QuantizeLayout, key: int, payload: Tensor, flag: Tensor) -> None:
    """Encode and commit in one pass. The flag is 1 afterwards if the input was not finite, else 0.

    If the input is not finite, the residual is restored, up to the rounding of an addition, as for TopK.
    """
    flag.zero_()
    _encode(tensor, residual, layout, key, payload, flag, update=True)
    _decode(payload.unsqueeze(0), layout, tensor, SUBTRACT, 1.0, residual, flag)
    _mark(layout, payload, flag)


def commit(tensor: Tensor, residual: Tensor, layout: QuantizeLayout, key: int, payload: Tensor) -> None:
    """Compute residual <- tensor + residual - decode(payload)."""
    _decode(payload.unsqueeze(0), layout, tensor, ADD, -1.0, residual, None)


def decode(payloads: Tensor, layout: QuantizeLayout, key: int, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
    if out.dtype in REFERENCE_DTYPES:
        reference.decode(payloads, layout, key, out, weight, add)
    else:
        _decode(payloads, layout, None, KEEP if add else ZERO, weight, out, None)


def _encode(
    tensor: Tensor, residual: Tensor | None, layout: QuantizeLayout, key: int, payload: Tensor, flag: Tensor, *,
    update: bool,
) -> None:  # fmt: skip
    flat, kept = tensor.view(-1), None if residual is None else residual.view(-1)
    signed = key - (1 << 64) if key >> 63 else key
    for elements, part in layout.parts(layout.numel):
        g = flat[part.elements]
        r = g if kept is None else kept[part.elements]
        rows = _rows(layout)
        launch(
            encode_blocks, (triton.cdiv(g.numel(), rows * layout.block),), g, r, payload[part.nbytes], flag,
            triton.cdiv(elements, layout.block), g.numel(), signed, part.elements.start, layout.limit,
            BITS=layout.bits, BLOCK=layout.block, ROWS=rows, STOCHASTIC=layout.stochastic, HAS_R=kept is not None,
            UPDATE=update, MASKED=elements < layout.granule, num_warps=_warps(rows * layout.block),
        )  # fmt: skip


def _decode(
    payloads: Tensor, layout: QuantizeLayout, g: Tensor | None, start: int, weight: float, out: Tensor,
    flag: Tensor | None,
) -> None:  # fmt: skip
    flat, given = out.view(-1), out.view(-1) if g is None else g.view(-1)
    for elements, part in layout.parts(layout.numel):
        target = flat[part.elements]
        rows = _rows(layout)
        tiles = triton.cdiv(target.numel(), rows * layout.block)
        launch(
            decode_blocks, (tiles if flag is None else min(tiles, GUARDS),), payloads[:, part.nbytes.start :],
            given[part.elements], target, target if flag is None else flag, payloads.stride(0), payloads.shape[0],
            triton.cdiv(elements, layout.block), target.numel(), weight,
            BITS=layout.bits, BLOCK=layout.block, ROWS=rows, START=start, GUARDED=flag is not None,
            MASKED=elements < layout.granule, num_warps=_warps(rows * layout.block),
        )  # fmt: skip


def _rows(layout: QuantizeLayout) -> int:
    """Return the number of blocks of a program."""
    return min(BLOCKS_PER_RECORD, max(1, _TILE // layout.block))


def _warps(elements: int) -> int:
    return max(1, min(8, elements // 1024))


def _mark(layout: QuantizeLayout, payload: Tensor, flag: Tensor) -> None:
    rows, rest = divmod(layout.numel, layout.granule)
    pattern = replace(layout, numel=min(rows, 1) * layout.granule + rest)
    mark_if(flag, payload, reference, pattern, layout.record_nbytes(layout.granule), rows)
