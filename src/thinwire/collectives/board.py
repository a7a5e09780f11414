"""The key-value store of torch.distributed, as a notice board: slow, but it reaches every rank that lives.

The store may die with the rank that holds it. From then on the board is empty, and connections alone tell what happens.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Board:
    """Texts by key, for the ranks of one group."""

    def __init__(self, prefix: str, rank: int, store: Any = None) -> None:
        """On `store`, by default that of torch.distributed; `prefix` tells this group's keys from all others."""
        self._root = _client_of_torch() if store is None else store
        # A group may be made again under its old name on the same store, where the keys of the first one still are.
        life = self._prefixed(f"{prefix}/lives").add(str(rank), 1)
        self._prefix = f"{prefix}/{life}"
        self._store = self._prefixed(f"{self._prefix}/board")
        self.lost: str | None = None
        """Why the store does not answer any more."""

    def store(self, name: str) -> "PatientStore":
        """A store with keys of its own, to be given to torch."""
        return PatientStore(self._prefixed(f"{self._prefix}/{name}"))

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

    def _prefixed(self, prefix: str) -> Any:
        """Keys of their own, on the same store."""
        return dist.PrefixStore(prefix, self._root)  # type: ignore[attr-defined]

    def _ask(self, request: Callable[[], T], otherwise: T) -> T:
        if self.lost is None:
            try:
                return request()
            except RuntimeError as error:
                self.lost = str(error).splitlines()[0]
        return otherwise


class PatientStore(dist.Store):  # type: ignore[name-defined, misc]
    """Waits by asking again and again: torch's own store would lock out our other threads while it waits."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        end, pause = time.monotonic() + timeout.total_seconds(), 1e-4
        while not self._store.check(keys):
            if time.monotonic() > end:
                missing = [key for key in keys if not self._store.check([key])]
                raise RuntimeError(f"nothing within {timeout.total_seconds():g} s, keys: {missing[0]}")
            time.sleep(pause)
            pause = min(0.01, 1.5 * pause)


_LOCK = threading.Lock()
_client: tuple[object, Any] | None = None
"""(the default group, a connection of our own to its store)"""


def _client_of_torch() -> Any:
    """The store of the default group, through one connection for all groups.

    Of our own, so that our threads never wait for a request of the program's. Only one, because torch looks up the name
    of the host when it connects, which takes seconds where names are served badly.
    """
    global _client
    with _LOCK:
        world = dist.group.WORLD
        if _client is None or _client[0] is not world:
            store = (
                world.get_group_store()  # type: ignore[union-attr]
                if hasattr(world, "get_group_store")  # not in older torch
                else dist.distributed_c10d._world.pg_map[world][1]  # type: ignore[index]
            )
            _client = world, store.clone() if hasattr(store, "clone") else store
        return _client[1]
