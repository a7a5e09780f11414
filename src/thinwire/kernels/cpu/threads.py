"""Runs a kernel on several plain Python threads, because the kernels run without the GIL.

Numba's own parallel loops are not used. Their default scheduler aborts the process if two Python threads use it at
once, as the caller and the wire thread do, and their thread count is a separate setting from torch's.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

T = TypeVar("T")

SMALLEST_SHARE = 1 << 16  # With fewer elements, waking another thread costs more than it saves

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    """Drop the pool in a forked child, which has none of its parent's threads."""
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)


def shares(items: int, elements_per_item: int = 1, per_thread: int = 4) -> list[tuple[int, int]]:
    """Cut `items` into even ranges, several for each thread that is worth waking.

    If a thread is delayed, the others take over its ranges. torch's own threads cause such delays, because they spin
    for some milliseconds after an operation.
    """
    threads = min(torch.get_num_threads(), items * elements_per_item // SMALLEST_SHARE)
    count = max(1, min(items, per_thread * threads)) if threads > 1 else 1
    return [(items * i // count, items * (i + 1) // count) for i in range(count)]


def run(function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
    """Call function(*each) for every tuple of arguments, on several threads. Return the results in order."""
    global _pool
    if len(arguments) == 1:
        return [function(*arguments[0])]
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="thinwire")
    results: dict[int, T] = {}
    waiting = iter(range(len(arguments)))  # next() on it is atomic

    def work() -> None:
        for i in waiting:
            results[i] = function(*arguments[i])

    helpers = [_pool.submit(work) for _ in range(min(torch.get_num_threads(), len(arguments)) - 1)]
    try:
        work()
    finally:
        for helper in helpers:
            helper.cancel()  # one that has not begun is not needed any more
        wait(helpers)  # the others write into the caller's memory, so they must end before this returns
    for helper in helpers:
        if not helper.cancelled():
            helper.result()
    return [results[i] for i in range(len(arguments))]
