"""Ranks as threads of one process: `all_reduce_compressed` as between machines, without torch.distributed.

For simulations of many workers on one device, and for trying things out. Everything is as between processes, the
agreement, the algorithms, errors and bytes too; only the way of a message differs (local_link.py).

    def work(group):
        grad = torch.full((8,), float(group.rank))
        thinwire.all_reduce_compressed(grad, "quantize:bits=8", group=group)
        return grad

    LocalWorld(4).run(work)     # the same sum on each of four ranks
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from .transport.board import Board
from .transport.channel import Channel
from .transport.errors import CollectiveError
from .transport.link import Link
from .transport.local_link import LocalLink, Switchboard
from .transport.operation import Operation
from .transport.records import rank_list
from .transport.turns import Turns
from .transport.wire import Wire

P = ParamSpec("P")
T = TypeVar("T")


class LocalGroup:
    """One rank of a `LocalWorld`, to be given as `group` by one thread; others have theirs."""

    def __init__(self, world: "LocalWorld", rank: int) -> None:
        self.rank, self.size = rank, world.size
        self._world = world
        self.channel: Channel = LocalChannel(world, rank)

    def __repr__(self) -> str:
        return f"LocalGroup(rank {self.rank} of {self.size})"

    def barrier(self) -> None:
        """Wait until every rank has called this as often."""
        self._world.barrier(self.rank)

    def leave(self, reason: str) -> None:
        """This rank makes no further call: those who wait for one get an error that names it and says why."""
        self._world.leave(self.rank, reason)
        Operation(self.channel).refuse(reason)


class LocalWorld:
    """`size` ranks in this process; `groups` has one for each.

    size      how many.
    timeout   seconds that a rank waits for another.
    turns     True: one rank runs at a time, until it waits for the others in a collective. That is quicker where Python
              is the bottleneck, as when ranks share a GPU. A rank must not wait for another in any other way then, and
              `async_op` has no effect.

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
        self._arrivals = [0] * size
        self._left: dict[int, str] = {}
        self._found: dict[int, tuple[bool | None, int]] = {}
        self._lock = threading.Lock()
        self._switchboards: dict[int, Switchboard] = {}
        self.groups = [LocalGroup(self, rank) for rank in range(size)]

    def run(self, function: Callable[Concatenate[LocalGroup, P], T], *args: P.args, **options: P.kwargs) -> list[T]:
        """function(group, *args, **options) in a thread for each rank; what they return, by rank.

        What a rank raises is raised here, once all have ended: a rank that raises does not keep the others waiting.
        After an error make a new world: in this one the ranks may be at different operations.
        """

        def rank(group: LocalGroup) -> T:
            if self.takes_turns:
                self.turns.enter(group.rank)
            try:
                return function(group, *args, **options)
            except BaseException as error:
                error.add_note(f"On rank {group.rank} of {group.size}.")
                group.leave(f"it ended with {error!r}")
                raise
            finally:
                if self.takes_turns:
                    self.turns.leave(group.rank)

        with ThreadPoolExecutor(self.size, "thinwire-rank") as threads:
            futures = [threads.submit(rank, group) for group in self.groups]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:  # that of a collective may only be the echo of another
            raise min(errors, key=lambda error: isinstance(error, CollectiveError))
        return [future.result() for future in futures]

    def barrier(self, rank: int) -> None:
        """Wait until every rank has called this as often as `rank`."""
        self._arrivals[rank] += 1
        mine = self._arrivals[rank]
        self.turns.changed()
        if min(self._arrivals) >= mine:
            return
        self.turns.wait(rank, lambda: min(self._arrivals) >= mine or bool(self._left), self.timeout)
        if min(self._arrivals) < mine:
            late = [other for other, count in enumerate(self._arrivals) if count < mine]
            why = next((f"rank {rank}: {reason}" for rank, reason in self._left.items()), f"in {self.timeout:g} s")
            raise CollectiveError(f"{rank_list(late)} did not come to the barrier, {why}", late)

    def leave(self, rank: int, reason: str) -> None:
        """Let nobody wait for this rank at a barrier."""
        self._left[rank] = reason
        self.turns.changed()

    def once(self, number: int, look: Callable[[], bool]) -> bool:
        """Return what the first rank that asks finds: a look at a device waits for it."""
        with self._lock:
            found, asked = self._found.get(number, (None, 0))
            if found is None:
                found = look()
            self._found[number] = found, asked + 1
            if asked + 1 == self.size:
                del self._found[number]
            return found

    def switchboard(self, number: int) -> Switchboard:
        """The one that all ranks' links share from operation `number` on."""
        with self._lock:
            return self._switchboards.setdefault(number, Switchboard(self.size, self.turns))


class LocalChannel(Channel):
    """Between threads."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(
            None,
            "local",
            rank,
            list(range(world.size)),
            world.timeout,
            Board("thinwire/local", rank, world.store),
            None if world.takes_turns else Wire(),
        )
        self._world = world

    def once(self, number: int, look: Callable[[], bool]) -> bool:
        return self._world.once(number, look)

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, 1e-3))
        self._world.turns.wait(self.rank, lambda: True, None)

    def connect(self, number: int, deadline: float) -> Link:
        return LocalLink(self._world.switchboard(number), self.rank)
