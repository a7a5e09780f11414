"""TopK on the GPU: chunk by chunk in one pass, over the whole tensor in `topk_global`.

Chunks of up to 16,384 entries fit the registers of one block (`topk_encode`, `topk_decode`). Longer records take the
way of `chunk=none`, one after the other. Float64 goes to the reference.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from ..layout import TopKLayout, TopKRecord
from ..reference import topk as reference
from . import topk_decode, topk_global
from .launch import REFERENCE_DTYPES, launch, new_flag
from .marks import mark_if, marked_by
from .topk_encode import encode_chunks

LARGEST_CHUNK = 1 << 14
Adam = tuple[Tensor, Tensor, float, float, float, float, float, float]
"""m, v, and the numbers of `update.update_of`."""

_ENTRIES_PER_LANE = 32
_REGISTERS = 80
"""Per thread, for the usual records: six chunks of 4,096 at a time on a multiprocessor hide each other's waiting."""
_CHUNKS_PER_PROGRAM = 8
"""One after the other, if there are enough of them: the threshold of one is the first guess for the next."""
_PROGRAMS = 2048
_DECODE_WARPS = 4
_TILE = 2048
"""Bits of a bitmap at a time."""
_WIDE_LIMIT = 1 << 26
"""Sums of several payloads in 16 bits are added up in float32, this many entries at a time."""


def encode(tensor: Tensor, residual: Tensor | None, layout: TopKLayout, key: int, payload: Tensor) -> bool:
    if tensor.dtype in REFERENCE_DTYPES:
        return reference.encode(tensor, residual, layout, key, payload)
    flag = new_flag(tensor)
    encode_flagged(tensor, residual, layout, key, payload, flag)
    return not flag.item()


def encode_flagged(
    tensor: Tensor, residual: Tensor | None, layout: TopKLayout, key: int, payload: Tensor, flag: Tensor
) -> None:
    """`encode` without waiting for the device: flag, an int32 that was 0, becomes 1 if the input was not finite."""
    _encode(tensor, residual, layout, payload, flag, None, update=False)
    _mark(layout, payload, flag)


def compress(
    tensor: Tensor, residual: Tensor, layout: TopKLayout, key: int, payload: Tensor, flag: Tensor,
    adam: Adam | None = None,
) -> None:  # fmt: skip
    """`encode` and `commit` in one pass. flag: an int32 on the device; 1 afterwards if something was not finite, or 0.

    A chunk that is not finite leaves its residual as it is. The others have written theirs when that is found, so it is
    taken back: to the rounding of an addition, the residual is then what it was.

    adam: make the tensor Adam's update first, in the same pass (`adam.compress`).
    """
    if adam is not None and (tensor.dtype != torch.float32 or layout.record.n > LARGEST_CHUNK):
        raise ValueError(
            f"Adam's update in one pass with {tensor.dtype} and chunks of {layout.record.n}, expected float32 and at "
            f"most {LARGEST_CHUNK}; call adam.send and topk.compress instead"
        )
    if tensor.dtype in REFERENCE_DTYPES:
        finite = reference.encode(tensor, residual, layout, key, payload)
        flag.fill_(int(not finite))
        if finite:
            reference.commit(tensor, residual, layout, key, payload)
        return
    flag.zero_()
    _encode(tensor, residual, layout, payload, flag, adam, update=True)
    _finish(tensor, residual, layout, payload, flag)
    _mark(layout, payload, flag)


def undo(tensor: Tensor, residual: Tensor, layout: TopKLayout, key: int, payload: Tensor) -> None:
    """Take `compress` back: residual <- residual + decode(payload) - tensor, which is what it was but for rounding.

    For a rank that learns after `compress` that another rank's gradient was not finite. A payload that is marked has
    been taken back by `compress` itself, so nothing happens.
    """
    if tensor.dtype in REFERENCE_DTYPES:
        if bool(torch.isfinite(reference.unpack_record(payload[: layout.record.nbytes][None], layout.record)[1]).all()):
            reference.decode(payload.unsqueeze(0), layout, key, residual, 1.0, True)
            residual.sub_(tensor)
        return
    for record, part in layout.parts(layout.numel):
        g, r = tensor.view(-1)[part.entries], residual.view(-1)[part.entries]
        if record.n <= LARGEST_CHUNK:
            _decode(payload.unsqueeze(0), part.nbytes.start, record, g, topk_decode.SUBTRACT, 1.0, r)
        else:
            for mine, nbytes in _long_records(record, part.rows):
                topk_global.undo(g[mine], r[mine], record, payload[part.nbytes][nbytes])


def commit(tensor: Tensor, residual: Tensor, layout: TopKLayout, key: int, payload: Tensor) -> None:
    if tensor.dtype in REFERENCE_DTYPES:
        return reference.commit(tensor, residual, layout, key, payload)
    for record, part in layout.parts(layout.numel):
        g, r = tensor.view(-1)[part.entries], residual.view(-1)[part.entries]
        _decode(payload.unsqueeze(0), part.nbytes.start, record, g, topk_decode.ADD, -1.0, r)


def decode(payloads: Tensor, layout: TopKLayout, key: int, out: Tensor, weight: float, add: bool) -> None:
    if out.dtype in REFERENCE_DTYPES:
        return reference.decode(payloads, layout, key, out, weight, add)
    flat, start = out.view(-1), topk_decode.KEEP if add else topk_decode.ZERO
    # Several payloads are summed up in float32, and rounded once.
    narrow = out.dtype.itemsize == 2 and payloads.shape[0] > 1
    for record, part in layout.parts(_WIDE_LIMIT if narrow else layout.numel):
        target = flat[part.entries]
        total = target.to(torch.float32) if narrow else target
        _decode(payloads, part.nbytes.start, record, None, start, weight, total)
        if narrow:
            target.copy_(total)


# The ways through a record ------------------------------------------------------------------------------------------


def _encode(
    tensor: Tensor, residual: Tensor | None, layout: TopKLayout, payload: Tensor, flag: Tensor, adam: Adam | None, *,
    update: bool,
) -> None:  # fmt: skip
    flat, kept = tensor.view(-1), None if residual is None else residual.view(-1)
    for record, part in layout.parts(layout.numel):
        g, r = flat[part.entries], None if kept is None else kept[part.entries]
        out = payload[part.nbytes]
        if record.n <= LARGEST_CHUNK:
            moments = (
                None if adam is None else (adam[0].view(-1)[part.entries], adam[1].view(-1)[part.entries], *adam[2:])
            )
            _encode_chunks(g, r, record, part.rows, layout.limit, out, flag, moments, update)
        else:
            for mine, nbytes in _long_records(record, part.rows):
                r_row = None if r is None else r[mine]
                topk_global.encode(g[mine], r_row, record, layout.limit, out[nbytes], flag)


def _long_records(record: TopKRecord, rows: int) -> Iterator[tuple[slice, slice]]:
    """(entries, bytes) of each of some records that are too long for `topk_encode`."""
    for row in range(rows):
        yield slice(row * record.n, (row + 1) * record.n), slice(row * record.nbytes, (row + 1) * record.nbytes)


def _encode_chunks(
    g: Tensor, r: Tensor | None, record: TopKRecord, rows: int, limit: float, out: Tensor, flag: Tensor,
    adam: Adam | None, update: bool,
) -> None:  # fmt: skip
    size = max(16, triton.next_power_of_2(record.n))
    lanes = max(size // _ENTRIES_PER_LANE, min(32, size // 4))
    k, bitmap = max(16, triton.next_power_of_2(record.k)), triton.next_power_of_2(record.nbytes - record.high_at)
    per_program = max(1, min(_CHUNKS_PER_PROGRAM, rows // _PROGRAMS))
    programs = triton.cdiv(rows, per_program)
    scratch = torch.empty(programs * (k + 2 * bitmap), dtype=torch.int32, device=g.device)
    settings: dict[str, Any] = {"maxnreg": _REGISTERS} if g.is_cuda and k <= 512 and lanes <= 512 else {}
    launch(
        encode_chunks, (programs,), g, g if r is None else r, out, scratch, flag,
        *(adam or (g, g, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)), rows, per_program,
        record.n, record.k, record.low_bits, record.codes_at, record.low_at, record.high_at, record.nbytes, limit,
        BITS=record.bits, ADAM=adam is not None, HAS_R=r is not None, UPDATE=update, MASKED=record.n < size,
        STEPS=size // (4 * lanes), LANES=lanes, FIELD=8 if record.k < 256 else 16,
        K=k, LOW_BYTES=triton.next_power_of_2(max(1, record.high_at - record.low_at)),
        LOW_FIELDS=triton.next_power_of_2(7 // record.low_bits + 2) if record.low_bits else 0,
        BITMAP=bitmap, num_warps=max(1, lanes // 32), **settings,
    )  # fmt: skip


def _finish(tensor: Tensor, residual: Tensor, layout: TopKLayout, payload: Tensor, flag: Tensor) -> None:
    """If the flag is raised, take back what `_encode` has updated; else update what it has left, the long records."""
    for record, part in layout.parts(layout.numel):
        g, r = tensor.view(-1)[part.entries], residual.view(-1)[part.entries]
        if record.n <= LARGEST_CHUNK:
            _decode(payload.unsqueeze(0), part.nbytes.start, record, g, topk_decode.SUBTRACT, 1.0, r, flag)
        else:
            for mine, nbytes in _long_records(record, part.rows):
                topk_global.commit(g[mine], r[mine], record, payload[part.nbytes][nbytes], flag)


def _decode(
    payloads: Tensor, offset: int, record: TopKRecord, g: Tensor | None, start: int, weight: float, out: Tensor,
    flag: Tensor | None = None,
) -> None:  # fmt: skip
    """out <- (its start) + weight * the records of this kind that lie `offset` bytes into each payload."""
    rows, size = out.numel() // record.n, max(16, triton.next_power_of_2(record.n))
    if record.n > LARGEST_CHUNK:
        return topk_global.decode(payloads, offset, record, g, start, weight, out)
    bits = triton.next_power_of_2(8 * (record.nbytes - record.high_at))
    tile = min(bits, _TILE)
    at_once = 1 if bits > tile else max(1, min(8, 1024 // tile, triton.next_power_of_2(payloads.shape[0])))
    # A launch that only looks at the flag need not start a block for every chunk.
    per_program = 1 if flag is None else 64
    mine = payloads[:, offset:]
    aligned = mine.data_ptr() % 4 == 0 and payloads.stride(0) % 4 == 0 and record.nbytes % 4 == 0
    launch(
        topk_decode.decode_chunks, (triton.cdiv(rows, per_program),), mine, out if g is None else g, out,
        out if flag is None else flag, rows, per_program, payloads.stride(0), payloads.shape[0],
        record.n, record.k, record.low_bits, record.codes_at, record.low_at, record.high_at, record.nbytes, weight,
        BITS=record.bits, GUARDED=flag is not None, START=start, MASKED=record.n < size, CHUNK=size,
        WIDTH=min(size, 512), LOW_SPAN=(record.low_bits + 14) // 8, TILE=tile, ALIGNED=aligned, AT_ONCE=at_once,
        num_warps=_DECODE_WARPS if size <= 4096 else 8,
    )  # fmt: skip


def _mark(layout: TopKLayout, payload: Tensor, flag: Tensor) -> None:
    """The payload of an input that was not finite, if the flag says so."""
    rows = min(layout.rows, 1)
    tail = layout.tail.n if layout.tail else 0
    pattern = TopKLayout(rows * layout.record.n + tail, layout.dtype, rows, layout.record, layout.tail)
    mark_if(flag, payload, marked_by(reference, pattern, payload.device), layout.record.nbytes, layout.rows)
