"""Spread a kernel over threads: plain Python threads, since the kernels run without the GIL.

Numba's own parallel loops were not taken: their default scheduler aborts the process when two Python threads use it at
once, as overlapping buckets do, and their thread count is a setting of its own beside torch's.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

T = TypeVar("T")

SMALLEST_SHARE = 1 << 16
"""Entries below which waking another thread costs more than it saves."""

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    """A forked child has none of its parent's threads."""
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)


def shares(items: int, entries_per_item: int = 1) -> list[tuple[int, int]]:
    """Cut `items` into one even range for each thread that is worth waking."""
    count = max(1, min(torch.get_num_threads(), items, items * entries_per_item // SMALLEST_SHARE))
    return [(items * i // count, items * (i + 1) // count) for i in range(count)]


def run(function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
    """function(*each) for every tuple of arguments, each in a thread of its own; the results in order."""
    global _pool
    if len(arguments) == 1:
        return [function(*arguments[0])]
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="thinwire")
    others = [_pool.submit(function, *each) for each in arguments[1:]]
    try:
        first = function(*arguments[0])
    finally:
        wait(others)  # they write into the caller's memory, so they must have ended when this returns
    return [first, *(other.result() for other in others)]
