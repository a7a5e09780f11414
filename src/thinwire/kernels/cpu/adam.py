"""Adam's update in one pass over memory (`reference.adam` defines it): 16 bytes an entry to send, 12 to commit."""

from typing import Any

import numpy as np
from torch import Tensor

from . import threads
from .jit import as_array, kernel


def send(g: Tensor, m: Tensor, v: Tensor, decay: float, gain: float, scale: float, floor: float) -> None:
    arrays = [as_array(tensor) for tensor in (g, m, v)]
    numbers = [arrays[0].dtype.type(number) for number in (decay, gain, scale, floor)]
    _spread(send_entries, arrays, numbers)


def commit(u: Tensor, m: Tensor, v: Tensor, scale: float, floor: float) -> None:
    arrays = [as_array(tensor) for tensor in (u, m, v)]
    _spread(commit_entries, arrays, [arrays[0].dtype.type(number) for number in (scale, floor)])


def _spread(function: Any, arrays: list[Any], numbers: list[Any]) -> None:
    def share(first: int, last: int) -> None:
        function(*(array[first:last] for array in arrays), *numbers)

    threads.run(share, threads.shares(arrays[0].size))


@kernel
def send_entries(g, m, v, decay, gain, scale, floor):  # type: ignore[no-untyped-def]
    for i in range(g.size):
        g[i] = (gain * g[i] + decay * m[i]) / (scale * np.sqrt(v[i]) + floor)


@kernel
def commit_entries(u, m, v, scale, floor):  # type: ignore[no-untyped-def]
    for i in range(u.size):
        m[i] = u[i] * (scale * np.sqrt(v[i]) + floor)
