"""A thread that looks around for operations which take long, so that those which do not never pay for it."""

import threading
import time
from typing import Protocol

PATIENCE_SECONDS = 1.0


class Watched(Protocol):
    def look_around(self) -> None:
        """Called again and again while the operation takes long."""

    def give_up(self, error: BaseException) -> object:
        """Called if the program ends first."""


class Watch:
    """Calls `look_around` of everything that has been watched for longer than a second, twice a second."""

    def __init__(self) -> None:
        self._since: dict[Watched, float] = {}
        self._thread: threading.Thread | None = None
        self._lock, self._work = threading.Lock(), threading.Event()
        self._program_ended = False

    def begin(self, operation: Watched) -> None:
        self._since[operation] = time.monotonic()
        if self._program_ended:
            raise RuntimeError("the program ended before the operation began")
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # also in a forked child
                self._thread = threading.Thread(target=self._run, name="thinwire-watch", daemon=True)
                self._thread.start()
        self._work.set()

    def end(self, operation: Watched) -> None:
        self._since.pop(operation, None)

    def end_all(self) -> None:
        """The program ends: what is still under way must not keep it, nor the other ranks, waiting."""
        self._program_ended = True
        for operation in list(self._since):
            operation.give_up(RuntimeError("the program ended before the operation did"))

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            while self._since:
                time.sleep(PATIENCE_SECONDS / 2)
                self._look()

    def _look(self) -> None:
        """By itself, so that between two looks no variable of the thread keeps an operation, and all it belongs to."""
        now = time.monotonic()
        for operation, since in list(self._since.items()):
            if now - since >= PATIENCE_SECONDS:
                operation.look_around()


watch = Watch()
# Before Python waits for the threads of executors, which an ordinary atexit function would come after.
threading._register_atexit(watch.end_all)  # type: ignore[attr-defined]
