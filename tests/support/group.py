"""Functions that run as ranks of processes and of threads alike: (rank, world_size, *args, group=None)."""

from collections.abc import Callable
from typing import Any

from thinwire.testing import RankPool, run_threads


def run_group(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """As `RankPool.run`, by threads. The function passes `group` on to thinwire; in processes it is None.

    >>> run_group(lambda rank, world_size, group: (rank, world_size, group.rank), 2)
    [(0, 2, 0), (1, 2, 1)]
    """
    return run_threads(lambda group: function(group.rank, group.size, *args, group=group), world_size, timeout=timeout)


def run_ranks(pool: RankPool | None, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """By processes of the pool, as DDP needs them; by threads without a pool."""
    return run_group(function, world_size, *args) if pool is None else pool.run(function, world_size, *args)
