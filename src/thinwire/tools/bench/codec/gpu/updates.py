"""Measures Adam's update: `write` computes it before it is compressed, `advance` updates the moments after the step."""

from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.updates import AdamUpdate

from .check import ENTRIES, check_update
from .floors import Floors
from .rows import Row
from .timer import Timer

WRITE, ADVANCE = "write Adam's update", "advance Adam's moments and the residual"


def measure_updates(timer: Timer, floors: Floors) -> Iterator[Row]:
    """Check and time `write` and `advance`.

    `write` reads gradient and moments and writes the update. `advance` reads the residual too, and writes the moments
    and the residual. The moments have the dtype of the residual, which is float32 for a gradient of 16 bits too.
    """
    buffers = timer.buffers
    dtype, width = buffers.residuals[0].dtype, buffers.residual_bytes
    momenta, made = buffers.new(dtype), buffers.new(dtype)
    squares = [each.square_().add_(0.1) for each in buffers.new(dtype)]
    updates = [_adam(m, v) for m, v in zip(momenta, squares, strict=True)]
    some = slice(0, ENTRIES)
    check_update(_adam(momenta[0][some], squares[0][some]), buffers.gradients[0][some], buffers.residuals[0][some])
    kernel = kernels.adam(buffers.device)
    name = getattr(kernel, "__name__", type(kernel).__name__)
    moved = buffers.gradient_bytes + 3 * width
    yield timer.row(
        WRITE, moved, lambda i: updates[i].write(buffers.gradients[i], made[i]), kernel=name, **floors.of(moved)
    )
    moved = buffers.gradient_bytes + 6 * width
    yield timer.row(
        ADVANCE, moved, lambda i: updates[i].advance(buffers.gradients[i], buffers.residuals[i]), kernel=name,
        **floors.of(moved),
    )  # fmt: skip


def _adam(m: Tensor, v: Tensor) -> AdamUpdate:
    numbers = {"beta1": 0.5, "factor": 1.0, "scale": 1.0, "floor": 1e-8, "limit": 8.0, "rate": 1.0, "beta2": 0.999}
    by_numbers = kernels.adam_by_numbers(m.device)
    on_device = None if by_numbers is None else torch.tensor(by_numbers.numbers_of(**numbers), device=m.device)
    return AdamUpdate(m, v, **numbers, on_device=on_device)
