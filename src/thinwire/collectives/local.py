"""Ranks as threads of one process: `all_reduce_compressed` without torch.distributed.

This is for simulations of many ranks on one device. Only the transport of messages differs (local_link.py).
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from .transport.board import Board
from .transport.channel import Channel
from .transport.errors import CollectiveError, rank_list
from .transport.link import Link
from .transport.local_link import LocalLink, Switchboard, Turns
from .transport.operation import Operation
from .transport.wire import Wire

P = ParamSpec("P")
T = TypeVar("T")


class LocalGroup:
    """One rank of a `LocalWorld`. Each thread uses its own as the argument `group`."""

    def __init__(self, world: "LocalWorld", rank: int) -> None:
        self.rank, self.size = rank, world.size
        self._world = world
        self.channel: Channel = LocalChannel(world, rank)

    def __repr__(self) -> str:
        return f"LocalGroup(rank {self.rank} of {self.size})"

    def barrier(self) -> None:
        """Wait until every rank has called `barrier` as often as this rank. Raise CollectiveError if one does not."""
        world, arrivals = self._world, self._world.arrivals
        arrivals[self.rank] += 1
        mine = arrivals[self.rank]
        world.turns.changed()
        if min(arrivals) < mine:
            world.turns.wait(self.rank, lambda: min(arrivals) >= mine or bool(world.left), world.timeout)
        if min(arrivals) < mine:
            late = [other for other, count in enumerate(arrivals) if count < mine]
            why = next((f"rank {rank}: {reason}" for rank, reason in world.left.items()), f"waited {world.timeout:g} s")
            raise CollectiveError(f"{rank_list(late)} did not reach the barrier: {why}", late)

    def leave(self, reason: str) -> None:
        """Make no further call on this rank. Ranks that wait for it get an error with this rank and the reason."""
        self._world.left[self.rank] = reason
        self._world.turns.changed()
        Operation(self.channel).refuse(reason)


class LocalWorld:
    """A world of `size` ranks in this process. `groups` has a `LocalGroup` for each rank.

    timeout   seconds that a rank waits for another rank.
    turns     True: one rank runs at a time, until it waits for the others in a collective, which is faster if Python is
              the bottleneck. Ranks must not wait for each other in any other way then, and `async_op` has no effect.

    >>> import torch, thinwire
    >>> def work(group):
    ...     tensor = torch.full((5,), 127.0 * group.rank)  # eight bits hold it exactly
    ...     thinwire.all_reduce_compressed(tensor, "quantize:bits=8", group=group)
    ...     return float(tensor[0])
    >>> LocalWorld(3).run(work)
    [381.0, 381.0, 381.0]
    """

    def __init__(self, size: int, *, timeout: float = 300.0, turns: bool = False) -> None:
        if type(size) is not int or size < 1:
            raise ValueError(f"a world of {size!r} ranks, expected a whole number from 1 up")
        self.size, self.timeout, self.takes_turns = size, timeout, turns
        self.turns = Turns(size)
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.arrivals = [0] * size  # of each rank at a barrier
        self.left: dict[int, str] = {}  # ranks that make no further call, and why
        self.switchboards: dict[int, Switchboard] = {}  # by the number of the connection
        self.groups = [LocalGroup(self, rank) for rank in range(size)]

    def run(self, function: Callable[Concatenate[LocalGroup, P], T], *args: P.args, **options: P.kwargs) -> list[T]:
        """Call function(group, *args, **options) in one thread for each rank. Return the list of results by rank.

        An error of a rank is raised here after all have ended. The world is of no use then: make a new one.
        """
        with ThreadPoolExecutor(self.size, "thinwire-rank") as threads:
            ranks = [partial(self.run_rank, rank, function, *args, **options) for rank in range(self.size)]
            futures = [threads.submit(rank) for rank in ranks]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:  # a CollectiveError may only be a consequence of another error
            raise min(errors, key=lambda error: isinstance(error, CollectiveError))
        return [future.result() for future in futures]

    def run_rank(
        self, rank: int, function: Callable[Concatenate[LocalGroup, P], T], *args: P.args, **options: P.kwargs
    ) -> T:
        """Call the function in this thread as one rank. If it raises, no other rank waits for this one."""
        group = self.groups[rank]
        if self.takes_turns:
            self.turns.enter(rank)
        try:
            return function(group, *args, **options)
        except BaseException as error:
            error.add_note(f"On rank {rank} of {self.size}.")
            group.leave(f"it ended with {error!r}")
            raise
        finally:
            if self.takes_turns:
                self.turns.leave(rank)


class LocalChannel(Channel):
    """A channel between threads of one process."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        board, wire = Board("thinwire/local", rank, world.store), None if world.takes_turns else Wire()
        ranks = list(range(world.size))
        super().__init__(rank=rank, ranks=ranks, timeout=world.timeout, board=board, wire=wire, backend="local")
        self._world = world

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, 1e-3))
        self._world.turns.wait(self.rank, lambda: True, None)

    def connect(self, number: int, deadline: float) -> Link:
        board = self._world.switchboards.setdefault(number, Switchboard(self.size, self._world.turns))
        return LocalLink(board, self.rank)
