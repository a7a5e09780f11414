"""RandomK on the CPU: one element from each stratum. `reference.randomk` defines the draw.

`encode` processes strata in batches of about 4,096 elements. While a batch is in the L1 cache, it reads all of it to
check that it is finite. The drawn elements cost almost nothing in addition.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layout import RandomKLayout, residual_dtype
from ..reference import randomk as reference
from ..reference.dense import mark, read_values
from . import threads
from .jit import INFINITY_BITS, as_array, draw, kernel, magnitude_bits, prefetch_now
from .selection import total_at

BATCH = 4096
"""Elements in a batch of strata."""
AHEAD = 64
"""Number of strata whose elements are prefetched while earlier ones are added."""


def encode(tensor: Tensor, residual: Tensor | None, layout: RandomKLayout, key: int, payload: Tensor) -> bool:
    """Write the payload of tensor + residual. If the sum is not finite, write the mark and return False."""
    g, r = as_array(tensor), None if residual is None else as_array(residual)
    values = torch.empty(layout.k, dtype=residual_dtype(layout.dtype))
    chosen, infinity, scale = values.numpy(), INFINITY_BITS[values.itemsize], residual is None

    def gather(first: int, last: int) -> bool:
        return bool(gather_strata(g, r, layout.k, np.uint64(key), first, scale, infinity, chosen[first:last]))

    if not all(threads.run(gather, _shares(layout))):
        mark(layout, payload)
        return False
    reference.write(values, layout, payload)
    return True


def commit(tensor: Tensor, residual: Tensor, layout: RandomKLayout, key: int, payload: Tensor) -> None:
    """Compute residual <- tensor + residual - decode(payload)."""
    residual.add_(tensor)
    decode(payload.unsqueeze(0), layout, key, residual, -1.0, True)


def decode(payloads: Tensor, layout: RandomKLayout, key: int, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
    if out.dtype.itemsize == 2:  # k elements only: torch does as well
        reference.decode(payloads, layout, key, out, weight, add)
        return
    if not add:
        out.zero_()
    target = as_array(out)
    for payload in payloads:
        values = read_values(payload, layout.dtype).to(out.dtype).numpy()

        def share(first: int, last: int, values: Any = values) -> None:
            add_strata(values[first:last], layout.k, np.uint64(key), first, values.dtype.type(weight), target)

        threads.run(share, _shares(layout))


check = reference.check


def _shares(layout: RandomKLayout) -> list[tuple[int, int]]:
    return threads.shares(layout.k, layout.numel // layout.k)


@kernel
def stratum_start(numel: int, k: int, stratum: int) -> int:
    """Return the position of the first element of a stratum."""
    return stratum * (numel // k) + min(stratum, numel % k)


@kernel
def place_in(numel: int, k: int, key: Any, stratum: int) -> Any:
    """Return the position drawn in this stratum."""
    start = stratum_start(numel, k, stratum)
    width = stratum_start(numel, k, stratum + 1) - start
    return start + (np.int64(draw(key, stratum) >> np.uint64(32)) * width >> 31)


@kernel
def gather_strata(g: Any, r: Any, k: int, key: Any, first: int, scale: bool, infinity: int, values: Any) -> bool:
    """Write the drawn elements of g + r to `values`, times the width of the stratum if `scale`.

    Return False if any element of these strata, drawn or not, is not finite.
    """
    strata = max(1, BATCH * k // g.size)
    for j in range(0, values.size, strata):
        stop = min(j + strata, values.size)
        begin, end = stratum_start(g.size, k, first + j), stratum_start(g.size, k, first + stop)
        largest = magnitude_bits(values.dtype.type(0))
        for i in range(end - begin):
            largest = max(largest, magnitude_bits(total_at(g, r, np.uintp(begin + i))))
        if largest >= infinity:
            return False
        for s in range(j, stop):
            value = total_at(g, r, place_in(g.size, k, key, first + s))
            if scale:
                value *= values.dtype.type(
                    stratum_start(g.size, k, first + s + 1) - stratum_start(g.size, k, first + s)
                )
            values[s] = value
    return True


@kernel
def add_strata(values: Any, k: int, key: Any, first: int, weight: Any, out: Any) -> None:
    """Compute out += weight * values at the drawn positions, which are prefetched before they are needed."""
    positions = np.empty(AHEAD, np.int64)
    for j in range(values.size + AHEAD):
        slot = j % AHEAD
        if j >= AHEAD:
            out[positions[slot]] += weight * values[j - AHEAD]
        if j < values.size:
            positions[slot] = place_in(out.size, k, key, first + j)
            prefetch_now(out, positions[slot])
