"""TopK on the CPU: chunk by chunk here, over the whole tensor in `topk_global`.

`settle` updates moments and residual and decodes, chunk by chunk, while the elements are in the cache.
"""

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ..layout import TopKLayout, TopKRecord, residual_dtype
from ..reference import topk as reference
from ..updates import AdamUpdate, Update
from . import checks, threads, topk_global
from .adam import advance_entries, advance_numbers
from .jit import INFINITY_BITS, as_array, kernel, stage_limit, staged, widen
from .records import add_entries, read_record, write_record
from .selection import fill_magnitudes, largest, select, smallest, total_at

LARGEST_CHUNK = 1 << 16
"""Largest record that fits the cache. `topk_global` handles larger ones, which only chunk=None makes."""

GUESS_MARGIN = {4: 1 << 19, 8: 1 << 48}
"""Distance of the next guess below the last chunk's threshold, in units of `magnitude_bits`: 3 to 6 percent."""


def encode(tensor: Tensor, residual: Tensor | None, layout: TopKLayout, key: int, payload: Tensor) -> bool:
    """Write the payload of tensor + residual. If the sum is not finite, write the mark and return False."""
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
    """Compute residual <- tensor + residual - decode(payload)."""
    g, r, payloads = as_array(tensor), as_array(residual), payload.unsqueeze(0).numpy()
    for record, part in layout.parts(layout.numel):
        if record.n > LARGEST_CHUNK:
            residual.add_(tensor)
            topk_global.decode(payloads, part.nbytes.start, record, -1.0, r)
        else:
            _decode_part(payloads, part.nbytes.start, record, g[part.entries], -1.0, False, r[part.entries])


def settle(
    gradient: Tensor, residual: Tensor, layout: TopKLayout, key: int, payloads: Tensor, own: int, weight: float,
    update: Update | None, out: Tensor,
) -> None:  # fmt: skip
    """Compute residual += encoded tensor - payloads[own], and out <- weight * each payload.

    The encoded tensor is the gradient or, if there is one, the update, whose moments advance. Everything happens in one
    pass, unless `out` has 16 bits or chunks do not fit the cache; only updates other than Adam's need a pass of their
    own. `out` may be the gradient itself.
    """
    vectors = {"r": as_array(residual), "g": as_array(gradient)}
    numbers = None
    fused = out.dtype.itemsize >= 4 and layout.record.n <= LARGEST_CHUNK
    if fused and isinstance(update, AdamUpdate):
        vectors |= {"m": as_array(update.m), "v": as_array(update.v)}
        numbers = advance_numbers(update)
    elif update is not None:
        update.advance(gradient, residual)
        del vectors["g"]  # it is in the residual by now
    if not fused:
        if update is None:
            commit(gradient, residual, layout, key, payloads[own])
        else:
            decode(payloads[own : own + 1], layout, key, residual, -1.0, True)
        decode(payloads, layout, key, out, weight, False)
        return
    vectors["out"] = as_array(out)
    for record, part in layout.parts(layout.numel):
        mine = {name: vector[part.entries] for name, vector in vectors.items()}
        _settle_part(payloads.numpy(), own, part.nbytes.start, record, mine, numbers, weight)


def _settle_part(
    payloads: Any, own: int, offset: int, record: TopKRecord, vectors: dict[str, Any], numbers: Any, weight: float
) -> None:
    bitmap, factor = record.nbytes - record.high_at, vectors["out"].dtype.type(weight)

    def share(first: int, last: int) -> None:
        entries, start = slice(first * record.n, last * record.n), offset + first * record.nbytes
        mine = {name: vector[entries] for name, vector in vectors.items()}
        moments = None if numbers is None else (mine["m"], mine["v"], numbers)
        settle_chunks(payloads, own, start, record, bitmap, mine.get("g"), mine["r"], moments, factor, mine["out"])

    threads.run(share, threads.shares(vectors["out"].size // record.n, record.n))


def decode(payloads: Tensor, layout: TopKLayout, key: int, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
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


def check(payload: Tensor, layout: TopKLayout) -> None:
    """Raise ValueError for bytes that no compressor can have written; a faster `reference.topk.check`."""
    data = checks.readable(payload, layout)
    marked = checks.is_marked(data, layout.leading_float)
    for record, part in layout.parts(layout.numel):
        compare = checks.compare_fields(record.low_bits)
        find = partial(checks.bad_topk_record, data, part.nbytes.start, record, compare, marked)
        bad = checks.first_bad(find, part.rows, record.k)
        if bad != checks.NONE:
            at = part.nbytes.start + bad * record.nbytes
            alone = TopKLayout(record.n, layout.dtype, 1, record, None)
            number = part.entries.start // layout.record.n + bad
            checks.refuse(reference.check, number, payload[at : at + record.nbytes], alone, payload, layout)


@kernel
def encode_chunks(
    g: Any, r: Any, record: Any, magnitudes: Any, values: Any, infinity: int, margin: int, limit: float, out: Any
) -> bool:
    """Encode every chunk of g + r, which are only read. Return False at the first chunk that is not finite.

    `magnitudes` (padded with -1 after the chunk) and `values` are scratch. Their dtypes set the precision.
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
    """Compute out <- (out + g, or 0 without g) + weight * each payload, chunk by chunk in the L1 cache."""
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
    payloads: Any, own: int, offset: int, record: Any, bitmap: int, g: Any, r: Any, moments: Any, weight: Any, out: Any
) -> None:
    """Compute r <- r + g - payloads[own], and out <- weight * each payload.

    With `moments` (m, v, numbers), Adam's update replaces g, and the moments advance. Without g, r already contains it.
    """
    n = record.n
    positions, values = np.empty(record.k, np.int64), np.empty(record.k, np.float32)
    minus_one = r.dtype.type(-1)
    for row in range(out.size // n):
        entries = slice(row * n, (row + 1) * n)
        kept, chunk = r[entries], out[entries]
        if moments is not None:
            m, v, numbers = moments
            advance_entries(g[entries], m[entries], v[entries], kept, *numbers)
        elif g is not None:
            taken = g[entries]
            for i in range(n):
                kept[i] += widen(taken[i])
        chunk[:] = 0  # only now: it may be the gradient's memory
        start = offset + row * record.nbytes
        for p in range(payloads.shape[0]):
            data = payloads[p][start : start + record.nbytes]
            count = read_record(data, record, 0, bitmap, 0, positions, values, chunk)
            if p == own:
                add_entries(positions, values, count, minus_one, kept)
            add_entries(positions, values, count, weight, chunk)


@kernel
def add_chunks(payloads: Any, offset: int, record: Any, bitmap: int, weight: Any, out: Any) -> None:
    """Compute out += weight * each payload. One record is read while the elements for the last one are prefetched."""
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
