"""RandomK on the CPU: gather and scatter of one entry out of each stratum (`reference.randomk` defines the draw)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layout import RandomKLayout, residual_dtype
from ..reference import randomk as reference
from ..reference.dense import read_values
from . import threads
from .jit import INFINITY_BITS, as_array, draw, kernel, magnitude_bits
from .selection import total_at


def encode(tensor: Tensor, residual: Tensor | None, layout: RandomKLayout, key: int, payload: Tensor) -> bool:
    g, r = as_array(tensor), None if residual is None else as_array(residual)
    dtype = residual_dtype(layout.dtype)

    def finite(start: int, stop: int) -> bool:
        return bool(largest_total(g[start:stop], None if r is None else r[start:stop]) < INFINITY_BITS[dtype.itemsize])

    if not all(threads.run(finite, threads.shares(layout.numel))):
        reference.mark(layout, payload)
        return False
    values = torch.empty(layout.k, dtype=dtype)
    chosen = values.numpy()

    def gather(first: int, last: int) -> None:
        gather_strata(g, r, layout.k, np.uint64(key), first, residual is None, chosen[first:last])

    threads.run(gather, threads.shares(layout.k, layout.numel // layout.k))
    reference.write(values, layout, payload)
    return True


def commit(tensor: Tensor, residual: Tensor, layout: RandomKLayout, key: int, payload: Tensor) -> None:
    residual.add_(tensor)
    decode(payload.unsqueeze(0), layout, key, residual, -1.0, True)


def decode(payloads: Tensor, layout: RandomKLayout, key: int, out: Tensor, weight: float, add: bool) -> None:
    if not add:
        out.zero_()
    if out.dtype.itemsize == 2:
        reference.decode(payloads, layout, key, out, weight, True)
        return
    target = as_array(out)
    for payload in payloads:
        values = read_values(payload, layout.dtype).to(out.dtype).numpy()

        def scatter(first: int, last: int, values: Any = values) -> None:
            scatter_strata(values[first:last], layout.k, np.uint64(key), first, target.dtype.type(weight), target)

        threads.run(scatter, threads.shares(layout.k, layout.numel // layout.k))


@kernel
def largest_total(g: Any, r: Any) -> Any:
    largest = magnitude_bits(total_at(g, r, 0))
    for i in range(g.size):
        largest = max(largest, magnitude_bits(total_at(g, r, i)))
    return largest


@kernel
def place_in(numel: int, k: int, key: Any, stratum: int) -> Any:
    """(position drawn in this stratum, width of the stratum)."""
    width, wider = numel // k, numel % k
    start = stratum * width + min(stratum, wider)
    if stratum < wider:
        width += 1
    return start + (np.int64(draw(key, stratum) >> np.uint64(32)) * width >> 31), width


@kernel
def gather_strata(g: Any, r: Any, k: int, key: Any, first: int, scale: bool, values: Any) -> None:
    for j in range(values.size):
        position, width = place_in(g.size, k, key, first + j)
        value = total_at(g, r, position)
        values[j] = value * values.dtype.type(width) if scale else value


@kernel
def scatter_strata(values: Any, k: int, key: Any, first: int, weight: Any, out: Any) -> None:
    for j in range(values.size):
        position, _ = place_in(out.size, k, key, first + j)
        out[position] += weight * values[j]
