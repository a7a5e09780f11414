"""Ranks as threads of the test's process, with a time-out for all of them together."""

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from ..collectives import CollectiveError, LocalWorld

T = TypeVar("T")

GRACE = 10.0  # Seconds that the other ranks have to end after one has raised


def run_threads(
    function: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0, turns: bool = False
) -> list[T]:
    """Call function(group, *args) in one thread for each rank. Return the results, ordered by rank.

    function   passes `group` on to thinwire, as the argument `group`. It is a `LocalGroup` with `rank` and `size`.
    timeout    seconds until every rank must have ended.
    turns      True: one rank runs at a time, see `LocalWorld`. The order is then the same in every run.

    What a rank raises is raised here, with its rank in a note. A `CollectiveError` is raised only if no rank raised
    anything else, since it may be a consequence. Ranks that do not end are named in a `TimeoutError`, with the place
    where they stand. They cannot be ended, but they do not keep the process from ending.

    >>> import torch, thinwire
    >>> def add_ranks(group):
    ...     total = torch.full((2,), float(group.rank))
    ...     thinwire.all_reduce_compressed(total, "none", group=group)
    ...     return total.tolist()
    >>> run_threads(add_ranks, 3)
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    world = LocalWorld(world_size, timeout=timeout, turns=turns)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run_rank(rank: int) -> None:
        try:
            results[rank] = world.run_rank(rank, function, *args)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    while (running := [thread for thread in threads if thread.is_alive()]) and time.monotonic() < deadline:
        running[0].join(0.05)
        deadline = min(deadline, time.monotonic() + GRACE) if errors else deadline
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    places = "\n".join(f"rank {rank} of {world_size} is here\n{_place(threads[rank])}" for rank in late)
    if errors:
        error = min(errors.values(), key=lambda error: isinstance(error, CollectiveError))
        if late:
            error.add_note(f"Other ranks did not end within {GRACE:g} s after that:\n{places}")
        raise error
    if late:
        raise TimeoutError(f"ranks {late} did not end within {timeout:g} s\n{places}")
    return [results[rank] for rank in range(world_size)]


def _place(thread: threading.Thread) -> str:
    collects = gc.isenabled()
    gc.disable()  # a collection inside of `_current_frames` can hang, before Python 3.11.9 (its issue 106883)
    frame = sys._current_frames().get(thread.ident or 0)
    if collects:
        gc.enable()
    return "".join(traceback.format_stack(frame)) if frame is not None else "(it has just ended)"
