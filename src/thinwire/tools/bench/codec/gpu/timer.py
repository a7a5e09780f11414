"""Times a call and returns the row for it."""

from dataclasses import dataclass
from typing import Any

from ..measurement import dtype_name
from .buffers import Buffers
from .clock import Call, Clock
from .rows import Row


@dataclass(frozen=True)
class Timer:
    """Times calls on a set of buffers."""

    buffers: Buffers
    clock: Clock
    samples: int
    """Number of samples for calls that can be captured into a graph.

    Other calls are slow and get an eighth of it, but at least 6.
    """

    def row(
        self, name: str, entry_bytes: float, call: Call, *, graph: bool = True, peak: bool = False, **details: Any
    ) -> Row:
        """Time a call on fresh gradients and residuals. `details` are further fields of the row."""
        self.buffers.reset()
        time = self.clock.time(call, self.samples if graph else max(6, self.samples // 8), graph=graph)
        return Row(
            name, self.buffers.numel, dtype_name(self.buffers.dtype), entry_bytes, time, graph,
            working_bytes=self.clock.peak(call) if peak else None, **details,
        )  # fmt: skip
