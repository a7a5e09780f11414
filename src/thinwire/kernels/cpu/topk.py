"""TopK on the CPU, chunk by chunk.

`apply` updates moments and residual and decodes, chunk by chunk, while the elements are in the cache.
"""

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ..layout import Part, TopKLayout, TopKRecord, residual_dtype
from ..reference import topk as reference
from ..updates import AdamUpdate, Update
from . import checks, threads
from .adam import advance_elements, numbers_of
from .jit import INFINITY_BITS, as_array, kernel, stage_limit, staged, widen
from .records import add_elements, read_record, write_record
from .selection import fill_magnitudes, largest, select, smallest, total_at

GUESS_MARGIN = {4: 1 << 19, 8: 1 << 48}
"""Distance of the next guess below the last chunk's threshold, in units of `magnitude_bits`: 3 to 6 percent."""


def encode(tensor: Tensor, residual: Tensor | None, layout: TopKLayout, payload: Tensor) -> bool:
    """Write the payload of tensor + residual. If the sum is not finite, write the mark and return False."""
    g, r, out = as_array(tensor), None if residual is None else as_array(residual), payload.numpy()
    for record, part in layout.parts(layout.numel):
        g_part, r_part = g[part.elements], None if r is None else r[part.elements]
        width = residual_dtype(layout.dtype).itemsize
        if not _encode_part(g_part, r_part, record, out[part.nbytes], width, layout.limit):
            reference.mark(layout, payload)
            return False
    return True


def _encode_part(g: Any, r: Any, record: TopKRecord, out: Any, width: int, limit: float) -> bool:
    def share(first: int, last: int) -> bool:
        elements, nbytes = slice(first * record.n, last * record.n), slice(first * record.nbytes, last * record.nbytes)
        magnitudes = np.full((record.n + 63) // 64 * 64, -1, f"i{width}")
        values = np.empty(record.k, f"f{width}")
        r_share = None if r is None else r[elements]
        finite = encode_chunks(
            g[elements], r_share, record, magnitudes, values, INFINITY_BITS[width], GUESS_MARGIN[width], limit,
            out[nbytes],
        )  # fmt: skip
        return bool(finite)

    return all(threads.run(share, threads.shares(g.size // record.n, record.n)))


def commit(tensor: Tensor, residual: Tensor, layout: TopKLayout, payload: Tensor) -> None:
    """Compute residual <- tensor + residual - decode(payload)."""
    g, r, payloads = as_array(tensor), as_array(residual), payload.unsqueeze(0).numpy()
    for record, part in layout.parts(layout.numel):
        _sum(payloads, part, record, None, g=g[part.elements], r=r[part.elements], out=r[part.elements])


def apply(
    gradient: Tensor, residual: Tensor, layout: TopKLayout, payloads: Tensor, own: int, weight: float,
    update: Update | None, out: Tensor,
) -> None:  # fmt: skip
    """Compute residual += encoded tensor - payloads[own], and out <- weight * each payload.

    The encoded tensor is the gradient or, if there is one, the update, whose moments advance. Everything happens in one
    pass; only updates other than Adam's need a pass of their own. `out` may be the gradient itself.
    """
    vectors, numbers = {"r": as_array(residual), "out": as_array(out)}, None
    if isinstance(update, AdamUpdate):
        vectors |= {"g": as_array(gradient), "m": as_array(update.m), "v": as_array(update.v)}
        numbers = numbers_of(update)
    elif update is not None:
        update.advance(gradient, residual)  # so that the residual contains it
    else:
        vectors["g"] = as_array(gradient)
    for record, part in layout.parts(layout.numel):
        mine = {name: vector[part.elements] for name, vector in vectors.items()}
        _sum(payloads.numpy(), part, record, weight, own=own, numbers=numbers, **mine)


def decode(payloads: Tensor, layout: TopKLayout, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
    data = payloads.numpy()
    for record, part in layout.parts(stage_limit(out)):
        with staged(out.view(-1)[part.elements], keep=add) as target:
            _sum(data, part, record, weight, add=add, out=target)


def _sum(
    payloads: Any, part: Part, record: TopKRecord, weight: float | None, *,
    own: int = 0, numbers: Any = None, add: bool = False, **vectors: Any,
) -> None:  # fmt: skip
    """Call `add_chunks` or `sum_chunks` with the vectors of one part: g, r, m, v and out, as far as there are any."""
    factor = None if weight is None else vectors["out"].dtype.type(weight)

    def share(first: int, last: int) -> None:
        elements, start = slice(first * record.n, last * record.n), part.nbytes.start + first * record.nbytes
        mine = {name: vector[elements] for name, vector in vectors.items()}
        if add:
            add_chunks(payloads, start, record, factor, mine["out"])
            return
        moments = None if numbers is None else (mine["m"], mine["v"], numbers)
        sum_chunks(payloads, own, start, record, mine.get("g"), mine.get("r"), moments, factor, mine["out"])

    threads.run(share, threads.shares(part.rows, record.n))


def check(payload: Tensor, layout: TopKLayout) -> None:
    """Raise ValueError for bytes that no compressor can have written; a faster `reference.topk.check`."""
    data = checks.readable(payload)
    marked = layout.is_marked(payload)
    for record, part in layout.parts(layout.numel):
        find = partial(checks.bad_topk_record, data, part.nbytes.start, record, marked)
        alone = partial(TopKLayout, record.n, layout.dtype, rows=1, record=record, tail=None)
        checks.check_part(find, part, record.k, reference.check, payload=payload, layout=layout, alone=alone)


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
def add_gradient(g: Any, out: Any) -> None:
    """Compute out += g. As a part of `sum_chunks`, this loop would not be vectorised."""
    for i in range(g.size):
        out[i] += widen(g[i])


@kernel
def sum_chunks(
    payloads: Any, own: int, offset: int, record: Any, g: Any, r: Any, moments: Any, weight: Any, out: Any
) -> None:
    """Compute r <- r + g - payloads[own], if there is an r, and out <- weight * each payload, if there is a weight.

    With `moments` (m, v, numbers), Adam's update replaces g, and the moments advance. Without g, r already contains it.
    """
    n = record.n
    positions, values = np.empty(record.k, np.int64), np.empty(record.k, np.float32)
    for row in range(out.size // n):
        elements = slice(row * n, (row + 1) * n)
        if r is not None:
            kept = r[elements]
            if moments is not None:
                m, v, numbers = moments
                advance_elements(g[elements], m[elements], v[elements], kept, *numbers)
            elif g is not None:
                add_gradient(g[elements], kept)
        chunk = out[elements]
        if weight is not None:
            chunk[:] = 0  # only now: it may be the gradient's memory
        start = offset + row * record.nbytes
        for p in range(payloads.shape[0]):
            data = payloads[p][start : start + record.nbytes]
            count = read_record(data, record, positions, values, chunk)
            if r is not None:  # noqa: SIM102 - after an `and`, Numba would compile this without an r, too
                if p == own:
                    add_elements(positions, values, count, r.dtype.type(-1), kept)
            if weight is not None:
                add_elements(positions, values, count, weight, chunk)


@kernel
def add_chunks(payloads: Any, offset: int, record: Any, weight: Any, out: Any) -> None:
    """Compute out += weight * each payload. One record is read while the elements for the last one are prefetched."""
    n = record.n
    positions, values = np.empty((2, record.k), np.int64), np.empty((2, record.k), np.float32)
    waiting, waiting_chunk, turn = 0, out, 0
    for row in range(out.size // n):
        chunk = out[row * n : (row + 1) * n]
        start = offset + row * record.nbytes
        for p in range(payloads.shape[0]):
            data = payloads[p][start : start + record.nbytes]
            count = read_record(data, record, positions[turn], values[turn], chunk)
            turn = 1 - turn
            add_elements(positions[turn], values[turn], waiting, weight, waiting_chunk)
            waiting, waiting_chunk = count, chunk
    add_elements(positions[1 - turn], values[1 - turn], waiting, weight, waiting_chunk)
