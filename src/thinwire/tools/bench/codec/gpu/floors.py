"""Plain torch on the same buffers in the same run: what kernels are held against.

torch adds a bfloat16 gradient to a float32 residual slowly (at two thirds of the memory's speed on an H200). A floor
made of that would flatter, so the floor is the speed of the float32 addition, times the bytes; the other stands beside.
"""

from dataclasses import dataclass
from typing import Any

import torch

from thinwire.tools.bench.measure import Timing

from .. import baselines
from .clock import SETS
from .rows import Row
from .timer import Timer

WIDE_ADD = 12
"""Bytes an entry of the float32 addition: two reads and a write."""


@dataclass(frozen=True)
class Floors:
    """What bytes take at best."""

    wide_add: Timing
    """`residual.add_(grad)`, both float32."""
    add: Timing
    """The same with a gradient of the dtype that is measured."""
    add_bytes: int
    """An entry of that."""
    write: Timing
    """Zeros over a residual."""

    def of(self, entry_bytes: float) -> dict[str, Any]:
        """Milliseconds of so many bytes an entry: the floor, and the one by torch's own addition of these dtypes."""
        return {
            "floor": self.wide_add.p50 * entry_bytes / WIDE_ADD,
            "torch_floor": self.add.p50 * entry_bytes / self.add_bytes,
        }


def measure_floors(timer: Timer) -> tuple[Floors, list[Row]]:
    buffers = timer.buffers
    gradients, residuals = buffers.gradients, buffers.residuals
    add_bytes = buffers.gradient_bytes + 2 * buffers.residual_bytes
    copy = timer.row("copy", 2 * buffers.gradient_bytes, lambda i: gradients[i].copy_(gradients[(i + 1) % SETS]))
    add = timer.row("residual.add_(grad)", add_bytes, lambda i: residuals[i].add_(gradients[i], alpha=1e-3))
    rows = [copy, add]
    wide_add = add
    if buffers.dtype != torch.float32:
        one, other = buffers.new(torch.float32), buffers.new(torch.float32)
        wide_add = timer.row("the same in float32", WIDE_ADD, lambda i: one[i].add_(other[i], alpha=1e-3))
        rows.append(wide_add)
    write = timer.row("out.zero_()", buffers.residual_bytes, lambda i: residuals[i].zero_())
    return Floors(wide_add.time, add.time, add_bytes, write.time), [*rows, write]


def measure_selection(timer: Timer, floors: Floors, k: int) -> tuple[Row, Row]:
    """The k largest of everything: by `torch.topk` alone, and with all that error feedback does around it."""
    buffers, share = timer.buffers, f"1/{timer.buffers.numel / k:.3g}"
    gradients, residuals = buffers.gradients, buffers.residuals

    def torch_ops(i: int) -> None:
        _, values = baselines.select(gradients[i], residuals[i], k)
        values.to(torch.float16)

    alone = timer.row(
        f"torch.topk, {share}", buffers.residual_bytes, lambda i: residuals[i].abs().topk(k, sorted=False), graph=False
    )
    whole = timer.row(
        f"torch: add topk gather fp16 clear, {share}", floors.add_bytes, torch_ops,
        graph=False, peak=True, **floors.of(floors.add_bytes),
    )  # fmt: skip
    return alone, whole
