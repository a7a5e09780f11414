"""Measures plain torch on the same buffers in the same run, as the reference for the kernels.

torch adds a bfloat16 gradient to a float32 residual slowly (at two thirds of the memory bandwidth on an H200). A floor
from that addition would be too easy to reach. The floor therefore uses the speed of the float32 addition, times the
bytes. The floor from the addition in the measured dtypes is reported as well.
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
"""Bytes per element of the float32 addition: two reads and a write."""


@dataclass(frozen=True)
class Floors:
    """Times of plain torch, from which floors are computed."""

    wide_add: Timing
    """Time of `residual.add_(grad)` with both in float32."""
    add: Timing
    """Time of `residual.add_(grad)` with a gradient of the measured dtype."""
    add_bytes: int
    """Bytes per element that `add` reads and writes."""
    write: Timing
    """Time to write zeros over a residual."""

    def of(self, entry_bytes: float) -> dict[str, Any]:
        """Return the floors in milliseconds for a number of bytes per element.

        `floor` is based on the float32 addition, `torch_floor` on torch's addition in the measured dtypes.
        """
        return {
            "floor": self.wide_add.p50 * entry_bytes / WIDE_ADD,
            "torch_floor": self.add.p50 * entry_bytes / self.add_bytes,
        }


def measure_floors(timer: Timer) -> tuple[Floors, list[Row]]:
    """Time copy, addition and zeroing in plain torch. Return the floors and the rows."""
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
    """Time the selection of the k largest elements: by `torch.topk` alone, and with the rest of error feedback."""
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
