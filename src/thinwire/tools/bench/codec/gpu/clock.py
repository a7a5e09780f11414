"""Times single calls with CUDA events, with none of their data in the cache.

Calls take turns on `SETS` sets of buffers. If possible, a call is captured into a CUDA graph. The time is then that of
the device alone, without Python.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from thinwire.tools.bench.measure import Timing, peak_memory, percentile

SETS = 3
Call = Callable[[int], object]
"""A timed function. Its argument is the index of the set of buffers that it works on."""


class Clock(Protocol):
    """Measures the time and memory of calls."""

    def time(self, call: Call, samples: int, *, graph: bool) -> Timing:
        """Return the time of `samples` calls.

        With `graph`, the call must neither wait for the device nor copy from the host.
        """

    def peak(self, call: Call) -> int | None:
        """Return the peak memory of a call in bytes, beyond the memory in use before it."""


class DeviceClock:
    """The clock of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, call: Call, samples: int, *, graph: bool) -> Timing:
        """Return the time of `samples` calls after a warm-up. With `graph`, the calls are replays of CUDA graphs."""
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
        """Return the peak memory of a call in bytes, beyond the memory in use before it."""
        return peak_memory(partial(call, 0), self._device)


def _captured(call: Call, index: int) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(index)
    return graph.replay
