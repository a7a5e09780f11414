"""Adam's update in one pass over memory: `write` moves 16 bytes per element, `advance` 28. `reference.adam` defines it.

`topk.apply` advances the moments chunk by chunk, so that its own work finds the elements in the cache.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.autograd.graph import increment_version

from ..reference import adam as reference
from ..updates import AdamUpdate
from . import threads
from .jit import as_array, fused_add, kernel, widen


def write(update: AdamUpdate, gradient: Tensor, out: Tensor) -> None:
    """Write the update to `out`."""
    arrays = [as_array(tensor) for tensor in (gradient, update.m, update.v, out)]
    _spread(write_elements, arrays, numbers_of(update)[:7])


def advance(update: AdamUpdate, gradient: Tensor, residual: Tensor | None) -> None:
    """Advance the moments, and add the update to the residual."""
    arrays = [as_array(tensor) for tensor in (gradient, update.m, update.v)]
    _spread(advance_elements, [*arrays, None if residual is None else as_array(residual)], numbers_of(update))


def step(parameters: list[Tensor], updates: list[Tensor], keep: float, rates: list[float]) -> None:
    """Compute p <- keep p - rate u for every parameter p and its update u.

    Tensors of 16 bits, of different dtypes or not contiguous use the reference.
    """
    for parameter, update, rate in zip(parameters, updates, rates, strict=True):
        alike = parameter.dtype == update.dtype and parameter.dtype.itemsize >= 4
        if alike and all(each.is_contiguous() and each.device.type == "cpu" for each in (parameter, update)):
            arrays = [as_array(parameter), as_array(update)]
            _spread(step_elements, arrays, typed(arrays[0], [keep, -rate]))
            increment_version(parameter)  # so that a backward pass through it as it was is refused
        else:
            reference.step([parameter], [update], keep, [rate])


def numbers_of(update: AdamUpdate) -> tuple[Any, ...]:
    """Return the numbers that `advance_elements` takes after the arrays; `write_elements` takes the first seven."""
    beta1, beta2, factor = update.beta1, update.beta2, update.factor
    made_of = [beta1, (1 - beta1) * factor, update.scale, update.floor, update.limit, update.rate]
    return typed(as_array(update.m), [*made_of, reference.largest(update.m.dtype), factor, beta2, 1 - beta2])


def typed(array: Any, numbers: Sequence[float]) -> tuple[Any, ...]:
    """Convert the numbers to the dtype of the array. Otherwise the arithmetic would be float64."""
    return tuple(array.dtype.type(number) for number in numbers)


def _spread(function: Any, arrays: list[Any], numbers: tuple[Any, ...]) -> None:
    def share(first: int, last: int) -> None:
        function(*(None if array is None else array[first:last] for array in arrays), *numbers)

    threads.run(share, threads.shares(arrays[0].size))


@kernel
def update_of(own, momentum, v, scale, floor, limit, rate, largest):  # type: ignore[no-untyped-def]
    """Return rate * momentum / (scale sqrt(v) + floor), cut to ±limit before the rate; ±Inf if |own| > largest."""
    update = momentum / (scale * np.sqrt(v) + floor)
    magnitude = abs(update)
    too_large = (magnitude > limit) & (magnitude < np.inf)
    sent = rate * (math.copysign(limit, update) if too_large else update)
    return math.copysign(np.inf, own) if abs(own) > largest else sent


@kernel
def write_elements(g, m, v, out, beta1, gain, scale, floor, limit, rate, largest):  # type: ignore[no-untyped-def]
    """Write the update of every element to `out`."""
    for i in range(m.size):
        own = gain * m.dtype.type(widen(g[i]))
        out[i] = update_of(own, own + beta1 * m[i], v[i], scale, floor, limit, rate, largest)


@kernel
def advance_elements(  # type: ignore[no-untyped-def]
    g, m, v, r, beta1, gain, scale, floor, limit, rate, largest, factor, beta2, rest
):
    """Advance the moments of every element, and add the update to r if there is one."""
    for i in range(m.size):
        gradient = m.dtype.type(widen(g[i]))
        own = gain * gradient
        momentum = own + beta1 * m[i]
        if r is not None:
            r[i] += update_of(own, momentum, v[i], scale, floor, limit, rate, largest)
        if beta2 < 1:
            gradient = factor * gradient
            v[i] = beta2 * v[i] + rest * gradient * gradient
        m[i] = momentum


@kernel
def step_elements(p, u, keep, gain):  # type: ignore[no-untyped-def]
    """Compute p <- keep p + gain u, rounded as torch does, so that replicas on other backends stay equal."""
    for i in range(p.size):
        p[i] = fused_add(gain, u[i], keep * p[i])
