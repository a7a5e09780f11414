"""Adam's update in one pass over memory (`reference.adam` defines it): 16 bytes an entry to send, 20 to commit."""

import math
from typing import Any

import numpy as np
from torch import Tensor

from . import threads
from .jit import as_array, kernel


def send(
    g: Tensor, m: Tensor, v: Tensor, beta1: float, factor: float, scale: float, floor: float, limit: float, rate: float
) -> None:
    _spread(send_entries, [g, m, v], [beta1, (1 - beta1) * factor, scale, floor, limit, rate])


def commit(
    u: Tensor, m: Tensor, v: Tensor, beta1: float, beta2: float, scale: float, floor: float, rate: float
) -> None:
    numbers = [scale / rate, floor / rate]
    if beta2 < 1:
        _spread(commit_both, [u, m, v], [*numbers, beta1, 1 / (1 - beta1), beta2, 1 - beta2])
    else:
        _spread(commit_momentum, [u, m, v], numbers)


def _spread(function: Any, tensors: list[Tensor], numbers: list[float]) -> None:
    arrays = [as_array(tensor) for tensor in tensors]
    typed = [arrays[0].dtype.type(number) for number in numbers]  # else the arithmetic would be float64

    def share(first: int, last: int) -> None:
        function(*(array[first:last] for array in arrays), *typed)

    threads.run(share, threads.shares(arrays[0].size))


@kernel
def send_entries(g, m, v, beta1, gain, scale, floor, limit, rate):  # type: ignore[no-untyped-def]
    for i in range(g.size):
        update = (gain * g[i] + beta1 * m[i]) / (scale * np.sqrt(v[i]) + floor)
        magnitude = abs(update)
        too_large = (magnitude > limit) & (magnitude < np.inf)
        g[i] = rate * (math.copysign(limit, update) if too_large else update)


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
