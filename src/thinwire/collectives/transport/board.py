"""The key-value store of torch.distributed as a notice board. It is slow, but every live rank can reach it.

The store may die with the rank that runs it, without an error, and torch would wait for an answer for ever. So requests
are made in a separate thread, for which the caller waits a few seconds at most. After that the board is empty for this
rank, which then detects failures by its connections alone.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from .forks import in_child

T = TypeVar("T")
_ANSWER_SECONDS = 3.0


class StoreThread:
    """Makes requests to a store, one after the other, in a daemon thread."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def ask(self, request: Callable[[], T]) -> T:
        """Return the answer to a request. Raise RuntimeError if there is none in time."""
        with self._lock:
            if self._thread is None:
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
    """Texts by key, shared by the ranks of one group. Without an answer of the store, it is empty."""

    def __init__(self, prefix: str, rank: int | None, store: Any = None, thread: StoreThread | None = None) -> None:
        """Open a board on `store`, by default that of torch.distributed. All keys of this group begin with `prefix`.

        rank   of a group that may be made again with its old name on a store that still has its keys; else None.
        """
        self._root, self._thread = _client_of_torch() if store is None else (store, thread or StoreThread())
        self._prefix = prefix
        if rank is not None:
            self._prefix += f"/{self._thread.ask(lambda: self._prefixed(f'{prefix}/lives').add(str(rank), 1))}"
        self._store = self._prefixed(f"{self._prefix}/board")
        self.lost: str | None = None  # why the store does not answer any more

    def below(self, name: str) -> "Board":
        return Board(f"{self._prefix}/{name}", None, self._root, self._thread)

    def store(self, name: str) -> "PatientStore":
        return PatientStore(self._prefixed(f"{self._prefix}/{name}"), self._thread)

    def read(self, key: str) -> str | None:
        there = self._ask(lambda: self._store.check([key]), False)  # `get` would wait for the key
        text = self._ask(lambda: self._store.get(key), None) if there else None
        return None if text is None else bytes(text).decode(errors="replace")

    def write(self, key: str, text: str) -> None:
        """Set the text of a key. When this returns, all ranks can read it."""
        # torch's store answers the second request alone. It handles those of one connection in their order.
        self._ask(lambda: (self._store.set(key, text), self._store.check([key])), None)

    def write_once(self, key: str, text: str) -> str | None:
        found = self._ask(lambda: self._store.compare_set(key, "", text), None)
        return None if found is None else bytes(found).decode(errors="replace")

    def count(self, key: str) -> int:
        return self._ask(lambda: int(self._store.add(key, 1)), 0)

    def delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key), None)

    def _prefixed(self, prefix: str) -> Any:
        return dist.PrefixStore(prefix, self._root)  # type: ignore[attr-defined]

    def _ask(self, request: Callable[[], T], otherwise: T) -> T:
        if self.lost is None:
            try:
                return self._thread.ask(request)
            except RuntimeError as error:
                self.lost = str(error).splitlines()[0]
        return otherwise


class PatientStore(dist.Store):  # type: ignore[name-defined, misc]
    """What gloo uses of a store. It polls, since a wait in torch's own store would block thinwire's other threads."""

    def __init__(self, store: Any, thread: StoreThread) -> None:
        super().__init__()
        self._store, self._thread = store, thread

    def set(self, key: str, value: bytes) -> None:
        self._thread.ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._thread.ask(lambda: bytes(self._store.get(key)))

    def check(self, keys: list[str]) -> bool:
        return self._thread.ask(lambda: bool(self._store.check(keys)))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        end, pause = time.monotonic() + timeout.total_seconds(), 1e-4
        while not self.check(keys):
            if time.monotonic() > end:
                missing = [key for key in keys if not self.check([key])]
                raise RuntimeError(f"no value within {timeout.total_seconds():g} s, keys: {missing[0]}")
            time.sleep(pause)
            pause = min(0.01, 1.5 * pause)


_LOCK = threading.Lock()
_client: tuple[object, Any, StoreThread] | None = None  # (default group, its store, thread)


def _drop_client() -> object:
    global _LOCK, _client
    dropped, _client, _LOCK = _client, None, threading.Lock()
    return dropped


in_child(_drop_client)


def _client_of_torch() -> tuple[Any, StoreThread]:
    """Return a connection to the store of the default group that the program does not use, and its thread.

    All groups share it, because torch looks up the host name to connect, which can take seconds.
    """
    global _client
    with _LOCK:
        world = dist.group.WORLD
        if _client is None or _client[0] is not world:
            store = dist.distributed_c10d._get_default_store()
            _client = world, store.clone() if hasattr(store, "clone") else store, StoreThread()
        return _client[1:]
