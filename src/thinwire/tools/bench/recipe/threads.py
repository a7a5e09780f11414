"""Ranks as threads of this process, asked as those of `thinwire.tools.workers` are."""

from types import TracebackType
from typing import Any, Self

from thinwire.collectives import CollectiveError
from thinwire.collectives.local import LocalGroup, LocalWorld
from thinwire.tools.workers import Actor, WorkerError


class Threads:
    """Takes the place of `Workers`; an actor also gets its `group`, and the list of all ranks' actors."""

    def __init__(self) -> None:
        self._world: LocalWorld | None = None
        self._actors: list[Any] = []

    def form(self, size: int, actor: Actor, *args: object) -> None:
        self._world = LocalWorld(size, turns=True)
        self._actors.clear()
        for group in self._world.groups:
            self._actors.append(actor(group.rank, size, *args, group=group, ranks=self._actors))

    def ask(self, method: str, *args: object) -> list[Any]:
        assert self._world is not None

        def answer(group: LocalGroup) -> Any:
            try:
                return getattr(self._actors[group.rank], method)(*args)
            except CollectiveError:  # of which another rank may be the cause
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
