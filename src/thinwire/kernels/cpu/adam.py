"""Adam's update in one pass over memory (`reference.adam` defines it): 16 bytes an entry to send, 20 to commit.

`topk.settle` commits chunk by chunk, where what is read and written is in the cache for what it does itself.
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
from .jit import as_array, fused_add, kernel


def send(
    g: Tensor, m: Tensor, v: Tensor, beta1: float, factor: float, scale: float, floor: float, limit: float, rate: float
) -> None:
    numbers = [beta1, (1 - beta1) * factor, scale, floor, limit, rate, reference.largest(g.dtype)]
    _spread(send_entries, [g, m, v], numbers)


def commit(
    u: Tensor, m: Tensor, v: Tensor, beta1: float, beta2: float, scale: float, floor: float, rate: float
) -> None:
    numbers = _commit_numbers(beta1, beta2, scale, floor, rate)
    if beta2 < 1:
        _spread(commit_both, [u, m, v], numbers)
    else:
        _spread(commit_momentum, [u, m, v], numbers[:2])


def step(parameters: list[Tensor], updates: list[Tensor], keep: float, rates: list[float]) -> None:
    left = []
    for parameter, update, rate in zip(parameters, updates, rates, strict=True):
        alike = parameter.dtype == update.dtype and parameter.dtype.itemsize >= 4
        if alike and all(each.is_contiguous() and each.device.type == "cpu" for each in (parameter, update)):
            _spread(step_entries, [parameter, update], [keep, -rate])
            increment_version(parameter)  # so that a backward pass through it as it was is refused
        else:
            left.append((parameter, update, rate))
    if left:
        reference.step([p for p, _, _ in left], [u for _, u, _ in left], keep, [rate for _, _, rate in left])


def commit_numbers(update: AdamUpdate) -> list[float]:
    """Of `commit_both`."""
    return _commit_numbers(update.beta1, update.beta2, update.scale, update.floor, update.rate)


def _commit_numbers(beta1: float, beta2: float, scale: float, floor: float, rate: float) -> list[float]:
    return [scale / rate, floor / rate, beta1, 1 / (1 - beta1), beta2, 1 - beta2]


def typed(array: Any, numbers: Sequence[float]) -> tuple[Any, ...]:
    """Else the arithmetic would be float64."""
    return tuple(array.dtype.type(number) for number in numbers)


def _spread(function: Any, tensors: list[Tensor], numbers: list[float]) -> None:
    arrays = [as_array(tensor) for tensor in tensors]
    given = typed(arrays[0], numbers)

    def share(first: int, last: int) -> None:
        function(*(array[first:last] for array in arrays), *given)

    threads.run(share, threads.shares(arrays[0].size))


@kernel
def send_entries(g, m, v, beta1, gain, scale, floor, limit, rate, largest):  # type: ignore[no-untyped-def]
    for i in range(g.size):
        own = gain * g[i]
        update = (own + beta1 * m[i]) / (scale * np.sqrt(v[i]) + floor)
        magnitude = abs(update)
        too_large = (magnitude > limit) & (magnitude < np.inf)
        sent = rate * (math.copysign(limit, update) if too_large else update)
        g[i] = math.copysign(np.inf, own) if abs(own) > largest else sent


@kernel
def step_entries(p, u, keep, gain):  # type: ignore[no-untyped-def]
    """Rounded as torch's two operations are: replicas of another backend must not drift apart."""
    for i in range(p.size):
        p[i] = fused_add(gain, u[i], keep * p[i])


@kernel
def commit_momentum(u, m, v, scale, floor):  # type: ignore[no-untyped-def]
    for i in range(u.size):
        m[i] = u[i] * (scale * np.sqrt(v[i]) + floor)


@kernel
def commit_both(u, m, v, scale, floor, beta1, inverse, beta2, rest):  # type: ignore[no-untyped-def]
    for i in range(u.size):
        momentum = u[i] * (scale * np.sqrt(v[i]) + floor)
        gradient = (momentum - beta1 * m[i]) * inverse
        v[i] = beta2 * v[i] + rest * gradient * gradient
        m[i] = momentum
