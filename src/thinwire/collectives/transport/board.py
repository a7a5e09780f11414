"""The key-value store of torch.distributed, as a notice board: slow, but it reaches every rank that lives.

The store may die with the rank that holds it, or be cut off without a word, in which case torch would wait for its
answer for ever: so a thread of our own does the asking, and whoever wants to know waits for a while. From then on the
board is empty, and connections alone tell what happens.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_ANSWER_SECONDS = 3.0
"""In which a store answers that ever will."""


class Clerk:
    """Asks a store, one request after the other, in a thread that nobody has to wait for."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def ask(self, request: Callable[[], T]) -> T:
        """The answer; RuntimeError if none comes."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # not yet begun, or left behind by a fork
                self._requests = queue.SimpleQueue()
                self._thread = threading.Thread(target=self._work, name="thinwire-board", daemon=True)
                self._thread.start()
        answer: Future[T] = Future()
        self._requests.put((request, answer))
        try:
            return answer.result(_ANSWER_SECONDS)
        except TimeoutError:
            raise RuntimeError(f"the store of the group has not answered within {_ANSWER_SECONDS:g} s") from None

    def _work(self) -> None:
        requests = self._requests
        while True:
            request, answer = requests.get()
            try:
                answer.set_result(request())
            except BaseException as error:
                answer.set_exception(error)


class Board:
    """Texts by key, for the ranks of one group."""

    def __init__(self, prefix: str, rank: int, store: Any = None) -> None:
        """On `store`, by default that of torch.distributed; `prefix` tells this group's keys from all others."""
        self._root, self._clerk = _client_of_torch() if store is None else (store, Clerk())
        # A group may be made again under its old name on the same store, where the keys of the first one still are.
        life = self._clerk.ask(lambda: self._prefixed(f"{prefix}/lives").add(str(rank), 1))
        self._prefix = f"{prefix}/{life}"
        self._store = self._prefixed(f"{self._prefix}/board")
        self.lost: str | None = None
        """Why the store does not answer any more."""

    def store(self, name: str) -> "PatientStore":
        """A store with keys of its own, to be given to torch."""
        return PatientStore(self._prefixed(f"{self._prefix}/{name}"), self._clerk)

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
                return self._clerk.ask(request)
            except RuntimeError as error:
                self.lost = str(error).splitlines()[0]
        return otherwise


class PatientStore(dist.Store):  # type: ignore[name-defined, misc]
    """Waits by asking again and again: torch's own store would lock out our other threads while it waits."""

    def __init__(self, store: Any, clerk: Clerk) -> None:
        super().__init__()
        self._store, self._clerk = store, clerk

    def set(self, key: str, value: bytes) -> None:
        self._clerk.ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._clerk.ask(lambda: bytes(self._store.get(key)))

    def add(self, key: str, amount: int) -> int:
        return self._clerk.ask(lambda: int(self._store.add(key, amount)))

    def check(self, keys: list[str]) -> bool:
        return self._clerk.ask(lambda: bool(self._store.check(keys)))

    def delete_key(self, key: str) -> bool:
        return self._clerk.ask(lambda: bool(self._store.delete_key(key)))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        end, pause = time.monotonic() + timeout.total_seconds(), 1e-4
        while not self.check(keys):
            if time.monotonic() > end:
                missing = [key for key in keys if not self.check([key])]
                raise RuntimeError(f"nothing within {timeout.total_seconds():g} s, keys: {missing[0]}")
            time.sleep(pause)
            pause = min(0.01, 1.5 * pause)


_LOCK = threading.Lock()
_client: tuple[object, Any, Clerk] | None = None
"""(the default group, a connection of our own to its store, who asks it)"""


def _client_of_torch() -> tuple[Any, Clerk]:
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
            _client = world, store.clone() if hasattr(store, "clone") else store, Clerk()
        return _client[1:]
