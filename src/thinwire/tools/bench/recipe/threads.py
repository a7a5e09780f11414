"""Runs ranks as threads of this process, with the interface of `thinwire.tools.workers`."""

from types import TracebackType
from typing import Any, Self

from thinwire.collectives import CollectiveError
from thinwire.collectives.local import LocalGroup, LocalWorld
from thinwire.tools.workers import Actor, WorkerError


class Threads:
    """Takes the place of `Workers`.

    The object on each rank also gets its `group`, and the list of the objects of all ranks.
    """

    def __init__(self) -> None:
        self._world: LocalWorld | None = None
        self._actors: list[Any] = []

    def form(self, size: int, actor: Actor, *args: object) -> None:
        """Form a world of `size` ranks and build an object on each, in place of the previous ones."""
        self._world = LocalWorld(size, turns=True)
        self._actors.clear()
        for group in self._world.groups:
            self._actors.append(actor(group.rank, size, *args, group=group, ranks=self._actors))

    def ask(self, method: str, *args: object) -> list[Any]:
        """Call a method of the object on each rank, in its thread, and return the results, ordered by rank.

        Raises WorkerError if a rank raises.
        """
        assert self._world is not None

        def answer(group: LocalGroup) -> Any:
            try:
                return getattr(self._actors[group.rank], method)(*args)
            except CollectiveError:  # another rank may be the cause
                raise
            except Exception as error:
                text = f"rank {group.rank} of {group.size} raised {type(error).__name__}: {error}"
                raise WorkerError(text) from error

        try:
            return self._world.run(answer)
        except CollectiveError as error:
            raise WorkerError(str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._world, self._actors = None, []
