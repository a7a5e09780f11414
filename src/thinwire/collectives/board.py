"""The group's key-value store, as a notice board: slow, but it reaches every rank that lives.

The store may die with the rank that holds it. From then on the board is empty, and connections alone tell what happens.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Board:
    """Texts by key, for the ranks of one group."""

    def __init__(self, group: dist.ProcessGroup, prefix: str, rank: int) -> None:
        self._group, self._prefix = group, prefix
        # A group may be made again under its old name on the same store, where the keys of the first one still are.
        life = self.prefixed("lives").add(str(rank), 1)
        self._prefix = f"{prefix}/{life}"
        self._store = self.prefixed("board")
        self.lost: str | None = None
        """Why the store does not answer any more."""

    def prefixed(self, name: str) -> Any:
        """A client of the same store with keys, and a connection, of its own."""
        return dist.PrefixStore(f"{self._prefix}/{name}", _store_of(self._group))  # type: ignore[attr-defined]

    def read(self, key: str) -> str | None:
        there = self._ask(lambda: self._store.check([key]), False)  # `get` would wait for it
        text = self._ask(lambda: self._store.get(key), None) if there else None
        return None if text is None else bytes(text).decode()

    def write(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(key, text), None)

    def write_once(self, key: str, text: str) -> None:
        """Unless another rank was first."""
        self._ask(lambda: self._store.compare_set(key, "", text), None)

    def count(self, key: str) -> int:
        """How many times all ranks together have called this for the key, now included."""
        return self._ask(lambda: int(self._store.add(key, 1)), 0)

    def delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key), None)

    def _ask(self, request: Callable[[], T], otherwise: T) -> T:
        if self.lost is None:
            try:
                return request()
            except RuntimeError as error:
                self.lost = str(error).splitlines()[0]
        return otherwise


def _store_of(group: dist.ProcessGroup) -> Any:
    """A connection of our own to the group's store, so that our threads never wait for another's request."""
    store: Any = (
        group.get_group_store()
        if hasattr(group, "get_group_store")  # not in older torch
        else dist.distributed_c10d._world.pg_map[group][1]
    )
    return store.clone() if hasattr(store, "clone") else store
