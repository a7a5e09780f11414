"""TopK on the GPU, in one pass: chunks of up to 16,384 elements fit into the registers of one block."""

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from ..layout import TopKLayout, TopKRecord
from ..reference import topk as reference
from . import topk_decode, topk_sum
from .launch import REFERENCE_DTYPES, launch, new_flag
from .marks import mark_if
from .shared import SHARED_LIMIT
from .topk_encode import encode_chunks

_ELEMENTS_PER_LANE = 32
_REGISTERS = 128
"""Registers per thread for usual records: four chunks of 4,096 on a multiprocessor hide each other's latency."""
_CHUNKS_PER_PROGRAM = 8
"""Chunks of a program, one after the other, if there are enough: one's threshold is the first guess for the next."""
_PROGRAMS = 2048
_SUM_WARPS = 4  # Warps of `sum_chunks` for a chunk of 4,096
_TILE = 2048  # Bits of a bitmap at a time
_WIDE_LIMIT = 1 << 26
"""Elements at a time when several payloads are summed into 16 bits, because the sum needs a float32 tensor."""


def encode(tensor: Tensor, residual: Tensor | None, layout: TopKLayout, payload: Tensor) -> Tensor:
    """Write the payload of tensor + residual. Return a flag on the device: 1 if the sum is not finite."""
    flag = new_flag(tensor)
    flat, kept = tensor.view(-1), None if residual is None else residual.view(-1)
    for record, part in layout.parts(layout.numel):
        r = None if kept is None else kept[part.elements]
        _encode_chunks(flat[part.elements], r, record, part.rows, layout.limit, payload[part.nbytes], flag)
    rows = min(layout.rows, 1)
    pattern = replace(layout, numel=rows * layout.record.n + (layout.tail.n if layout.tail else 0), rows=rows)
    mark_if(flag, payload, reference, pattern, layout.record.nbytes, layout.rows)
    return flag


def commit(tensor: Tensor, residual: Tensor, layout: TopKLayout, payload: Tensor) -> None:
    """Compute residual <- tensor + residual - decode(payload)."""
    for record, part in layout.parts(layout.numel):
        g, r = tensor.view(-1)[part.elements], residual.view(-1)[part.elements]
        _decode(payload.unsqueeze(0), part.nbytes.start, record, g, topk_decode.ADD, -1.0, r)


def decode(payloads: Tensor, layout: TopKLayout, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
    if out.dtype in REFERENCE_DTYPES:
        return reference.decode(payloads, layout, out, weight, add)
    flat, start = out.view(-1), topk_decode.KEEP if add else topk_decode.ZERO
    for record, part in layout.parts(_WIDE_LIMIT if _narrow(payloads, out) else layout.numel):
        _decode(payloads, part.nbytes.start, record, None, start, weight, flat[part.elements])


def _narrow(payloads: Tensor, out: Tensor) -> bool:
    """Return whether several payloads are summed into 16 bits. Such sums are computed in float32 and rounded once."""
    return out.dtype.itemsize == 2 and payloads.shape[0] > 1


# Passes over a record -----------------------------------------------------------------------------------------------


def _encode_chunks(
    g: Tensor, r: Tensor | None, record: TopKRecord, rows: int, limit: float, out: Tensor, flag: Tensor
) -> None:
    size = max(16, triton.next_power_of_2(record.n))
    lanes = max(size // _ELEMENTS_PER_LANE, min(32, size // 4))
    k, bitmap = max(16, triton.next_power_of_2(record.k)), triton.next_power_of_2(record.nbytes - record.high_at)
    per_program = max(1, min(_CHUNKS_PER_PROGRAM, rows // _PROGRAMS))
    programs = triton.cdiv(rows, per_program)
    scratch = torch.empty(programs * (k + 2 * bitmap), dtype=torch.int32, device=g.device)
    settings: dict[str, Any] = {"maxnreg": _REGISTERS} if g.is_cuda and k <= 512 and lanes <= 512 else {}
    launch(
        encode_chunks, (programs,), g, g if r is None else r, out, scratch, flag, rows, per_program,
        record.n, record.k, record.low_bits, record.codes_at, record.low_at, record.high_at, record.nbytes, limit,
        BITS=record.bits, HAS_R=r is not None, MASKED=record.n < size,
        STEPS=size // (4 * lanes), LANES=lanes, FIELD=8 if record.k < 256 else 16,
        K=k, LOW_BYTES=triton.next_power_of_2(max(1, record.high_at - record.low_at)),
        LOW_FIELDS=triton.next_power_of_2(7 // record.low_bits + 2) if record.low_bits else 0,
        BITMAP=bitmap, num_warps=max(1, lanes // 32), **settings,
    )  # fmt: skip


def _decode(
    payloads: Tensor, offset: int, record: TopKRecord, g: Tensor | None, start: int, weight: float, out: Tensor
) -> None:
    """Compute out <- start + weight * the records that lie `offset` bytes into each payload.

    `start` is ZERO, KEEP or ADD of `topk_decode`.
    """
    rows, size = out.numel() // record.n, max(16, triton.next_power_of_2(record.n))
    bits = triton.next_power_of_2(8 * (record.nbytes - record.high_at))
    tile = min(bits, _TILE)
    at_once = 1 if bits > tile else max(1, min(8, 1024 // tile, triton.next_power_of_2(payloads.shape[0])))
    mine = payloads[:, offset:]
    aligned = mine.data_ptr() % 4 == 0 and payloads.stride(0) % 4 == 0 and record.nbytes % 4 == 0
    if start == topk_decode.ZERO and record.n == size and bits == tile and _sums_up(out, record, tile, at_once):
        warps = max(1, _SUM_WARPS * size // 4096)
        return launch(
            topk_sum.sum_chunks, (rows,), mine, out, payloads.stride(0), payloads.shape[0], weight,
            CHUNK=size, K=record.k, BITS=record.bits, LOW_BITS=record.low_bits, CODES_AT=record.codes_at,
            LOW_AT=record.low_at, HIGH_AT=record.high_at, NBYTES=record.nbytes, TILE=tile,
            SLOTS=max(triton.next_power_of_2(record.k), 32 * warps), AT_ONCE=at_once,
            ALIGNED=aligned, num_warps=warps,
        )  # fmt: skip
    if _narrow(payloads, out):
        total = out.to(torch.float32)
        _decode(payloads, offset, record, g, start, weight, total)
        out.copy_(total)
        return
    launch(
        topk_decode.decode_chunks, (rows,), mine, out if g is None else g, out, payloads.stride(0), payloads.shape[0],
        record.n, record.k, record.low_bits, record.codes_at, record.low_at, record.high_at, record.nbytes, weight,
        BITS=record.bits, START=start, MASKED=record.n < size, CHUNK=size, WIDTH=min(size, 512),
        LOW_SPAN=(record.low_bits + 14) // 8, TILE=tile, ALIGNED=aligned, AT_ONCE=at_once,
        num_warps=4 if size <= 4096 else 8,
    )  # fmt: skip


def _sums_up(out: Tensor, record: TopKRecord, tile: int, at_once: int) -> bool:
    """Return whether the sums of a chunk fit into shared memory, which only a GPU has."""
    return out.is_cuda and topk_sum.shared_bytes(record.n, record.nbytes, tile, at_once) <= SHARED_LIMIT
