"""The time of single calls by the device's own events, with nothing of their data in its cache.

Calls take turns on `SETS` sets of buffers. Where it can be, a call is captured into a CUDA graph: what is timed is then
the device alone, and not Python.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from thinwire.tools.bench.measure import Timing, peak_memory, percentile

SETS = 3
Call = Callable[[int], object]
"""Does its work on one of the sets of buffers."""


class Clock(Protocol):
    def time(self, call: Call, samples: int, *, graph: bool) -> Timing:
        """graph: the call never waits for the device, nor copies from the host."""

    def peak(self, call: Call) -> int | None:
        """Bytes that a call holds at its highest beyond what was held before."""


class DeviceClock:
    """That of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, call: Call, samples: int, *, graph: bool) -> Timing:
        for index in range(2 * SETS):  # compiles, and fills the caches of the allocator
            call(index % SETS)
        torch.cuda.synchronize(self._device)
        replays = [_captured(call, index) if graph else partial(call, index) for index in range(SETS)]
        for replay in replays:
            replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
        for index, (start, stop) in enumerate(events):
            start.record()
            replays[index % SETS]()
            stop.record()
        torch.cuda.synchronize(self._device)
        taken = [start.elapsed_time(stop) for start, stop in events]
        return Timing(percentile(taken, 20), percentile(taken, 50), percentile(taken, 80), samples)

    def peak(self, call: Call) -> int | None:
        return peak_memory(partial(call, 0), self._device)


def _captured(call: Call, index: int) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(index)
    return graph.replay
