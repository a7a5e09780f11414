"""Work for a GPU that is the same at every step: recorded as a CUDA graph, then started by a single call.

A step starts hundreds of kernels. The GPU needs microseconds for each of them, but Python tens of microseconds to start
it. A recording starts all of them in the time of one.

What is recorded are addresses and numbers as they were. So everything that changes from step to step, such as the
learning rate, must be read from the memory of the GPU, and tensors must stay where they are: the key says what the work
depends on, and with another key it is recorded anew.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch

_RUNS_BEFORE = 2
"""Runs with the same key before the one that is recorded: by then kernels are compiled, and memory is found."""


class Recording:
    """One piece of work.

    pool   torch's handle of the memory that recordings allocate. They may share one if they never run at the same time.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: Hashable = None
        self._runs = 0

    def has(self, key: Hashable) -> bool:
        """Whether the work was recorded with this key."""
        return self._graph is not None and key == self._key

    def replay(self, key: Hashable) -> bool:
        """Start the work on the current stream, if it was recorded with this key."""
        if self._graph is None or key != self._key:
            return False
        self._graph.replay()
        return True

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work on the current stream, in the way of Python; record it once it has been the same for a while."""
        if key != self._key:
            self._key, self._runs, self._graph = key, 0, None
        self._runs += 1
        if self._runs <= _RUNS_BEFORE:
            work()
            return
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # While this thread records, others may wait for the GPU and allocate memory, as the wire does. This is what
            # `torch.cuda.graph` does, but for collecting garbage and giving back memory, which take far longer.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        graph.replay()  # recording has done nothing so far
        self._graph = graph
