"""A thread that checks operations which take long. Operations that end within a second are never checked."""

import threading
import time
from typing import Any

from .forks import in_child

PATIENCE_SECONDS = 1.0


class Watch:
    """Calls `check_others` twice a second on every `Operation` that has been watched for a second or more."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all operations and the thread. A forked child has neither, and must not end those of its parent."""
        self._since: dict[Any, float] = {}
        self._thread: threading.Thread | None = None
        self._lock, self._work = threading.Lock(), threading.Event()
        self._program_ended = False

    def begin(self, operation: Any) -> None:
        """Start to watch an operation. Raise RuntimeError if the program has ended."""
        self._since[operation] = time.monotonic()
        if self._program_ended:
            raise RuntimeError("the program ended before the operation began")
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="thinwire-watch", daemon=True)
                self._thread.start()
        self._work.set()

    def end(self, operation: Any) -> None:
        self._since.pop(operation, None)

    def end_all(self) -> None:
        """Give up all operations when the program ends, so that neither this rank nor the others wait for them."""
        self._program_ended = True
        for operation in list(self._since):
            operation.give_up(RuntimeError("the program ended before the operation did"))

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            while self._since:
                time.sleep(PATIENCE_SECONDS / 2)
                self._check_all()

    def _check_all(self) -> None:
        """Check every operation, in a function of its own, whose variables keep none alive between two calls."""
        now = time.monotonic()
        for operation, since in list(self._since.items()):
            if now - since >= PATIENCE_SECONDS:
                operation.check_others()


watch = Watch()
in_child(watch.reset)
# Runs before Python waits for the threads of executors. An ordinary atexit function would run after that.
threading._register_atexit(watch.end_all)  # type: ignore[attr-defined]
