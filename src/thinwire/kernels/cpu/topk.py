"""TopK on the CPU: chunk by chunk here, over the whole tensor in `topk_global`.

`settle` brings moments and residual up to date and decodes, chunk by chunk, while the entries are in the cache.
(To make Adam's update in the pass that encodes was not quicker: both are bound by arithmetic.)
"""

from typing import Any

import numpy as np
from torch import Tensor

from ..layout import TopKLayout, TopKRecord, residual_dtype
from ..reference import topk as reference
from ..updates import AdamUpdate, Update
from . import threads, topk_global
from .adam import commit_both, commit_numbers, typed
from .jit import INFINITY_BITS, as_array, kernel, stage_limit, staged, widen
from .records import add_entries, read_record, write_record
from .selection import fill_magnitudes, largest, select, smallest, total_at

LARGEST_CHUNK = 1 << 16
"""Above it (only with chunk=None) a record does not fit the cache, and `topk_global` takes over."""

GUESS_MARGIN = {4: 1 << 19, 8: 1 << 48}
"""How far the next guess lies below the last chunk's threshold, in units of `magnitude_bits`: 3 to 6 percent."""


def encode(tensor: Tensor, residual: Tensor | None, layout: TopKLayout, key: int, payload: Tensor) -> bool:
    g, r, out = as_array(tensor), None if residual is None else as_array(residual), payload.numpy()
    for record, part in layout.parts(layout.numel):
        g_part, r_part = g[part.entries], None if r is None else r[part.entries]
        encode_part = topk_global.encode if record.n > LARGEST_CHUNK else _encode_part
        width = residual_dtype(layout.dtype).itemsize
        if not encode_part(g_part, r_part, record, out[part.nbytes], width, layout.limit):
            reference.mark(layout, payload)
            return False
    return True


def _encode_part(g: Any, r: Any, record: TopKRecord, out: Any, width: int, limit: float) -> bool:
    def share(first: int, last: int) -> bool:
        entries, nbytes = slice(first * record.n, last * record.n), slice(first * record.nbytes, last * record.nbytes)
        magnitudes = np.full((record.n + 63) // 64 * 64, -1, f"i{width}")
        values = np.empty(record.k, f"f{width}")
        r_share = None if r is None else r[entries]
        return bool(
            encode_chunks(
                g[entries],
                r_share,
                record,
                magnitudes,
                values,
                INFINITY_BITS[width],
                GUESS_MARGIN[width],
                limit,
                out[nbytes],
            )
        )

    return all(threads.run(share, threads.shares(g.size // record.n, record.n)))


def commit(tensor: Tensor, residual: Tensor, layout: TopKLayout, key: int, payload: Tensor) -> None:
    g, r, payloads = as_array(tensor), as_array(residual), payload.unsqueeze(0).numpy()
    for record, part in layout.parts(layout.numel):
        if record.n > LARGEST_CHUNK:
            residual.add_(tensor)
            topk_global.decode(payloads, part.nbytes.start, record, -1.0, r)
        else:
            _decode_part(payloads, part.nbytes.start, record, g[part.entries], -1.0, False, r[part.entries])


def settle(
    tensor: Tensor, residual: Tensor, layout: TopKLayout, key: int, payloads: Tensor, own: int, weight: float,
    update: Update | None,
) -> None:  # fmt: skip
    """update.commit, commit and decode; in one pass unless entries are of 16 bits or chunks do not fit the cache."""
    fused = layout.dtype.itemsize >= 4 and layout.record.n <= LARGEST_CHUNK
    moments, numbers = [], ()
    if fused and isinstance(update, AdamUpdate) and update.beta2 < 1:
        moments = [as_array(update.m), as_array(update.v)]
        numbers = typed(moments[0], commit_numbers(update))
    elif update is not None:
        update.commit(tensor)
    if not fused:
        commit(tensor, residual, layout, key, payloads[own])
        decode(payloads, layout, key, tensor, weight, False)
        return
    vectors, data = [as_array(tensor), as_array(residual), *moments], payloads.numpy()
    for record, part in layout.parts(layout.numel):
        _settle_part(data, own, part.nbytes.start, record, [v[part.entries] for v in vectors], numbers, weight)


def _settle_part(
    payloads: Any, own: int, offset: int, record: TopKRecord, vectors: list[Any], numbers: Any, weight: float
) -> None:
    bitmap, factor = record.nbytes - record.high_at, vectors[0].dtype.type(weight)

    def share(first: int, last: int) -> None:
        entries, start = slice(first * record.n, last * record.n), offset + first * record.nbytes
        g, r, *moments = (vector[entries] for vector in vectors)
        given = (*moments, numbers) if moments else None
        settle_chunks(payloads, own, start, record, bitmap, g, r, given, factor)

    threads.run(share, threads.shares(vectors[0].size // record.n, record.n))


def decode(payloads: Tensor, layout: TopKLayout, key: int, out: Tensor, weight: float, add: bool) -> None:
    data = payloads.numpy()
    for record, part in layout.parts(stage_limit(out)):
        with staged(out.view(-1)[part.entries], keep=add) as target:
            if record.n > LARGEST_CHUNK:
                if not add:
                    target.fill(0)
                topk_global.decode(data, part.nbytes.start, record, weight, target)
            else:
                _decode_part(data, part.nbytes.start, record, None, weight, add, target)


def _decode_part(payloads: Any, offset: int, record: TopKRecord, g: Any, weight: float, add: bool, out: Any) -> None:
    bitmap, factor = record.nbytes - record.high_at, out.dtype.type(weight)

    def share(first: int, last: int) -> None:
        entries, start = slice(first * record.n, last * record.n), offset + first * record.nbytes
        if add:
            add_chunks(payloads, start, record, bitmap, factor, out[entries])
        else:
            start_chunks(payloads, start, record, bitmap, None if g is None else g[entries], factor, out[entries])

    threads.run(share, threads.shares(out.size // record.n, record.n))


@kernel
def encode_chunks(
    g: Any, r: Any, record: Any, magnitudes: Any, values: Any, infinity: int, margin: int, limit: float, out: Any
) -> bool:
    """Every chunk of g + r into its record; False at the first that is not finite. Only reads g and r.

    `magnitudes` (filled with -1 behind the chunk) and `values` are scratch; their types say in which precision to work.
    """
    n, k = record.n, record.k
    bound = values.dtype.type(limit)
    found = np.empty_like(magnitudes)
    positions = np.empty(magnitudes.size, np.int32)
    codes = np.empty(k, np.uint16)
    guess = magnitudes.dtype.type(infinity - 1)
    for row in range(g.size // n):
        start = row * n
        reached = fill_magnitudes(g, r, start, n, guess, magnitudes)
        select(magnitudes, k, guess, reached, positions, found, g, r, start + n)
        if largest(found[:k]) >= infinity:
            return False
        for j in range(k):
            values[j] = min(max(total_at(g, r, start + positions[j]), -bound), bound)
        write_record(positions, values, record, codes, out[row * record.nbytes : (row + 1) * record.nbytes])
        guess = magnitudes.dtype.type(max(smallest(found[:k]) - margin, 1))
    return True


@kernel
def start_chunks(payloads: Any, offset: int, record: Any, bitmap: int, g: Any, weight: Any, out: Any) -> None:
    """out <- (out + g, or 0 if there is no g) + weight * each payload, chunk after chunk in the first-level cache."""
    n = record.n
    positions, values = np.empty(record.k, np.int64), np.empty(record.k, np.float32)
    for row in range(out.size // n):
        chunk = out[row * n : (row + 1) * n]
        if g is None:
            chunk[:] = 0
        else:
            for i in range(n):
                chunk[i] += widen(g[np.uintp(row * n + i)])
        start = offset + row * record.nbytes
        for p in range(payloads.shape[0]):
            data = payloads[p][start : start + record.nbytes]
            count = read_record(data, record, 0, bitmap, 0, positions, values, chunk)
            add_entries(positions, values, count, weight, chunk)


@kernel
def settle_chunks(
    payloads: Any, own: int, offset: int, record: Any, bitmap: int, g: Any, r: Any, moments: Any, weight: Any
) -> None:
    """r <- r + g - payload[own] and g <- weight * each payload; with `moments` (m, v, numbers) these follow g first."""
    n = record.n
    positions, values = np.empty(record.k, np.int64), np.empty(record.k, np.float32)
    minus_one = r.dtype.type(-1)
    for row in range(g.size // n):
        entries = slice(row * n, (row + 1) * n)
        chunk, kept = g[entries], r[entries]
        if moments is not None:
            m, v, numbers = moments
            commit_both(chunk, m[entries], v[entries], *numbers)
        for i in range(n):
            kept[i] += chunk[i]
            chunk[i] = 0
        start = offset + row * record.nbytes
        for p in range(payloads.shape[0]):
            data = payloads[p][start : start + record.nbytes]
            count = read_record(data, record, 0, bitmap, 0, positions, values, chunk)
            if p == own:
                add_entries(positions, values, count, minus_one, kept)
            add_entries(positions, values, count, weight, chunk)


@kernel
def add_chunks(payloads: Any, offset: int, record: Any, bitmap: int, weight: Any, out: Any) -> None:
    """out += weight * each payload. One record is read while the entries of the last one come from the memory."""
    n = record.n
    positions, values = np.empty((2, record.k), np.int64), np.empty((2, record.k), np.float32)
    waiting, waiting_chunk, turn = 0, out, 0
    for row in range(out.size // n):
        chunk = out[row * n : (row + 1) * n]
        start = offset + row * record.nbytes
        for p in range(payloads.shape[0]):
            data = payloads[p][start : start + record.nbytes]
            count = read_record(data, record, 0, bitmap, 0, positions[turn], values[turn], chunk)
            turn = 1 - turn
            add_entries(positions[turn], values[turn], waiting, weight, waiting_chunk)
            waiting, waiting_chunk = count, chunk
    add_entries(positions[1 - turn], values[1 - turn], waiting, weight, waiting_chunk)
