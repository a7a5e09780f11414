"""One call on one group. All ranks compare their arguments before they exchange the first byte (agreement.py).

A thread, the watch, checks operations that take long. Those that end within a second are never checked.
"""

import itertools
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from .agreement import PATIENCE_SECONDS, Agreement
from .channel import Channel
from .errors import CollectiveError
from .forks import in_child
from .link import Buffers, LinkBroken, Seen, Wait


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


class Operation(Agreement):
    """One call on one group, from its number to its last byte."""

    def __init__(self, channel: Channel, name: str = "all_reduce_compressed") -> None:
        self.channel, self.name = channel, name
        self.number, self._connection = channel.next()
        self._timeout = channel.timeout
        self._first_use, self._tag = False, 0
        self._exchanges = itertools.count()
        self._waits_for = (channel.rank + 1) % channel.size
        self.bytes_sent = self.bytes_received = self.messages = 0

    def limit(self, timeout: float | None) -> None:
        """Set the timeout in seconds, counted from `restart`. None keeps the timeout of the group."""
        self._timeout = self._timeout if timeout is None else timeout

    def restart(self) -> None:
        self._deadline = time.monotonic() + self._timeout

    def describe(self, call: str, draw: int | None) -> None:
        """Set the arguments that must be the same on all ranks, as JSON, and a key that may change."""
        self._call, self._draw = call, draw
        self._first_use = call not in self._connection.agreed
        self._connection.agreed.add(call)
        # 12 bits of the number, 3 for each exchange, 16 by the arguments: calls that differ are not matched.
        digest = zlib.crc32(f"{draw} {self._connection.number}".encode(), zlib.crc32(call.encode()))
        self._tag = self.number % 4096 << 19 | digest & 0xFFFF

    def start(self) -> None:
        """Start the timeout, and on first use compare the arguments with the other ranks."""
        self.restart()
        if self.channel.size == 1:
            return
        cause = self._connection.cause
        if cause is not None:
            self.refuse(f"an earlier operation failed: {cause}")
            raise self._error(cause, "an earlier operation failed: ")
        if self._first_use:
            self._agree()

    @property
    def waits_for_all(self) -> bool:
        """Return whether this operation first waits for all ranks, to compare arguments or to connect."""
        return self.channel.size > 1 and (self._first_use or not self._connection.connected)

    @property
    def failure(self) -> CollectiveError | None:
        cause = self._connection.cause
        return None if cause is None else self._error(cause)

    def post(self, sends: Buffers, receives: Buffers) -> Wait:
        """Start to send and receive all buffers. Return a function for `collect`, or raise the same errors."""
        tag = self._tag | next(self._exchanges) % 8 << 16
        if not any(buffer.numel() for buffers in (sends, receives) for buffer in buffers.values()):
            return lambda deadline, waits_for: Seen(sends, receives)
        try:
            wait = self._connection.link(self._deadline).post(sends, receives, tag)
        except (LinkBroken, RuntimeError) as error:
            raise self._explained(error) from error
        self.bytes_sent += sum(buffer.numel() for buffer in sends.values())
        self.bytes_received += sum(buffer.numel() for buffer in receives.values())
        self.messages += sum(buffer.numel() > 0 for buffer in sends.values())
        return wait

    def collect(self, wait: Wait) -> Seen:
        """Wait for a posted exchange. If it fails, raise a `CollectiveError` on every rank."""
        if self.channel.size == 1:
            return wait(self._deadline, self._set_peer)
        watch.begin(self)  # only the exchange that is waited for, to limit the requests to the store
        try:
            return wait(self._deadline, self._set_peer)
        except (LinkBroken, RuntimeError) as error:
            raise self._explained(error) from error
        finally:
            watch.end(self)

    def _set_peer(self, peer: int) -> None:
        self._waits_for = peer

    def give_up(self, error: BaseException) -> CollectiveError:
        """End this operation with an error from this rank or from another group, and notify the other ranks."""
        watch.end(self)
        found = error.found if isinstance(error, CollectiveError) else None
        cause = found or CollectiveError(f"rank {self.channel.me} gave up: {error!r}", [self.channel.me])
        if self.channel.size > 1:
            cause = self._connection.fail(cause)
            if not self._arrived:  # a rank on new connections would wait for this one to arrive
                self.refuse(str(cause))
        return self._error(cause)


@contextmanager
def refusing(operations: Sequence[Operation]) -> Iterator[None]:
    """Notify the other ranks if the `with` block raises an error, so that they do not wait for this rank."""
    try:
        yield
    except Exception as error:
        for operation in operations:
            operation.refuse(str(error))
        raise


def check_timeout(timeout: float | timedelta | None) -> float | None:
    """Return a timeout in seconds, or None. Raise ValueError unless it is above 0 and finite."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
        raise ValueError(f"timeout {timeout!r}, expected seconds above 0, or a timedelta")
    return seconds
