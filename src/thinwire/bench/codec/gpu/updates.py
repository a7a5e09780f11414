"""The rows of an optimizer's update: made from the gradient, compressed, and the rest kept, in one pass."""

from collections.abc import Iterator
from functools import partial

import torch

from thinwire.compressors import Compressor
from thinwire.kernels import DeviceKernel
from thinwire.kernels.layout import Layout
from thinwire.kernels.updates import AdamUpdate, MomentumUpdate, Update

from .check import ENTRIES, check_update
from .floors import Floors
from .rows import Row
from .timer import Timer


def measure_updates(
    compressor: Compressor, layout: Layout, kernel: DeviceKernel, timer: Timer, floors: Floors
) -> Iterator[Row]:
    """Gradient, moments and residual are read, the update (over the gradient) and the residual are written."""
    buffers, payloads = timer.buffers, timer.buffers.payloads(layout)
    momenta = buffers.new(torch.float32)
    squares = [each.square_().add_(0.1) for each in buffers.new(torch.float32)]
    some = slice(0, ENTRIES)
    short = compressor.layout(momenta[0][some].numel(), buffers.dtype)
    for name, make, moments in (
        ("Adam's", lambda i, part: _adam(momenta[i][part], squares[i][part]), 2),
        ("SGD's", lambda i, part: MomentumUpdate(momenta[i][part], gain=1.0, share=0.5, rate=0.1), 1),
    ):
        check_update(make(0, some), short, buffers.gradients[0][some], buffers.residuals[0][some], kernel)
        updates = [make(index, slice(None)) for index in range(len(momenta))]

        def call(i: int, updates: list[Update]) -> None:
            gradient, residual = buffers.gradients[i], buffers.residuals[i]
            kernel.compress(gradient, residual, layout, 0, payloads[i][0], buffers.flag, updates[i])

        moved = 2 * buffers.gradient_bytes + 2 * buffers.residual_bytes + 4 * moments + layout.nbytes / buffers.numel
        yield timer.row(
            f"compress {name} update, one pass", moved, partial(call, updates=updates), payload_bytes=layout.nbytes,
            kernel=getattr(kernel, "__name__", type(kernel).__name__), **floors.of(moved),
        )  # fmt: skip


def _adam(m: torch.Tensor, v: torch.Tensor) -> AdamUpdate:
    return AdamUpdate(m, v, beta1=0.5, factor=1.0, scale=1.0, floor=1e-8, limit=8.0, rate=1.0)
