"""Recording of GPU work that is the same in every step: a CUDA graph, which a single call launches.

A step launches hundreds of kernels. Each takes the GPU microseconds, but Python takes tens of microseconds to launch
it. A recording launches all of them in the time of one.

A recording contains the addresses and numbers at the time it was made. Everything that changes from step to step, such
as the learning rate, must therefore be read from GPU memory, and tensors must stay at their addresses. The key contains
everything else that the work depends on. With another key the work is recorded anew.
"""

import gc
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

_RUNS_BEFORE = 2
"""Runs with the same key before the run that is recorded. By then kernels are compiled and memory is allocated."""


class RecordingMemory:
    """The memory pool of recordings that never run at the same time, and may overwrite what the others left."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def pool_for(self, graph: torch.cuda.CUDAGraph) -> Any:
        """Return torch's handle of the pool in which a graph that is recorded now allocates.

        torch closes a pool for good when its last graph has gone, although some of its memory may still be in use.
        """
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        return self._handle


class Recording:
    """A piece of work that is recorded as a CUDA graph.

    memory   that of all recordings that never run at the same time as this one.
    """

    def __init__(self, memory: RecordingMemory) -> None:
        self._memory = memory
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: Hashable = None
        self._runs = 0

    def has(self, key: Hashable) -> bool:
        return self._graph is not None and key == self._key

    def replay(self, key: Hashable) -> bool:
        """Start the recorded work on the current stream. Return False if it was not recorded with this key."""
        if self._graph is None or not self.has(key):
            return False
        self._graph.replay()
        return True

    def run(self, key: Hashable, work: Callable[[], None]) -> bool:
        """Run the work on the current stream; return True if it was a replay, and `work` was not called.

        After `_RUNS_BEFORE` runs with the same key, the work is recorded.
        """
        if self.replay(key):
            return True
        if key != self._key:
            self._key, self._runs, self._graph = key, 0, None
        self._runs += 1
        if self._runs <= _RUNS_BEFORE:
            work()
            return False
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # While this thread records, others may wait for the GPU and allocate memory, as the wire does. This is what
            # `torch.cuda.graph` does, but for collecting garbage and giving back memory, which take far longer.
            collects = gc.isenabled()
            gc.disable()  # the garbage may hold other graphs, and freeing one in this thread ends the capture
            try:
                graph.capture_begin(pool=self._memory.pool_for(graph), capture_error_mode="thread_local")
                work()
            finally:
                if collects:
                    gc.enable()
                graph.capture_end()
        graph.replay()  # recording has done nothing so far
        self._graph = graph
        return False
