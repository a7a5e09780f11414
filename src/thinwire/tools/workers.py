"""Processes on this machine that form gloo process groups and run the methods that the parent calls.

    with Workers(4) as workers:
        workers.form(2, Actor, *args)          # a group of the first two; each builds Actor(rank, 2, *args)
        answers = workers.ask("method", *args)     # [actor.method(*args) of each rank]

Calls and results go through pipes, so that the loopback interface carries only what the ranks exchange. If a rank
raises an exception or dies, the parent raises a `WorkerError` with its rank. No process outlives the `with` block or
the program.
"""

import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..collectives import CollectiveError

LIMIT_SECONDS = 300.0
"""Default time limit for a result. First calls load torch, and may compile the kernels, in all processes at once."""
GRACE_SECONDS = 3.0
"""Time limit for the other results once one rank has failed. One of them may name the cause."""
HOST = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Actor = Callable[..., object]


class WorkerError(Exception):
    """Raised when a rank raised an exception, died, or did not answer in time.

    rank     the rank that failed.
    reason   what happened, without the rank.
    trace    traceback of the rank; empty if it died, or raised a ValueError or OSError, whose message is enough.
    """

    def __init__(self, text: str, rank: int | None = None, reason: str = "", trace: str = "") -> None:
        super().__init__(text)
        self.rank, self.reason, self.trace = rank, reason, trace


class Failure(NamedTuple):
    """A failed call. A rank sends it in place of a result."""

    reason: str
    trace: str = ""
    is_echo: bool = False
    """Whether the call failed only because another rank failed."""


class Workers:
    """Processes that start together and end with the `with` block.

    threads   number of torch threads in each process.
    limit     timeout of the process group in seconds; an exchange with a rank that does not answer then fails.
    """

    def __init__(self, count: int, threads: int = 1, limit: float = LIMIT_SECONDS) -> None:
        self._limit = limit
        context = _context()
        self._lines: list[Connection] = []
        self._processes = []
        self._size = 0
        self._store: Any = None
        with _signals_wait():
            for _ in range(count):
                line, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
                process.start()
                theirs.close()
                self._lines.append(line)
                self._processes.append(process)

    def form(self, size: int, actor: Actor, *args: object) -> None:
        """Form a process group of the first `size` processes, and build `actor(rank, size, *args)` in each of them.

        The new group replaces the previous one.
        """
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._make(size, actor, args, self._store.port)

    def make(self, size: int, actor: Actor, *args: object) -> None:
        """Build `actor(rank, size, *args)` in the first `size` processes, without a process group.

        Use it for a class that forms the process group itself.
        """
        self._make(size, actor, args, None)

    def _make(self, size: int, actor: Actor, args: tuple[object, ...], port: int | None) -> None:
        self._size = size
        limit = max(LIMIT_SECONDS, self._limit)  # that of the process group, which the ranks form now
        self._question([(None, (port, self._limit, rank, size, actor, args)) for rank in range(size)], limit)

    def ask(self, method: str, *args: object, limit: float | None = LIMIT_SECONDS) -> list[Any]:
        """Call this method on every rank and return the results, ordered by rank.

        limit   seconds to wait for the results; None waits without a limit.
        """
        return self._question([(method, args)] * self._size, limit)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process that is still alive."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _question(
        self, questions: Sequence[tuple[str | None, tuple[object, ...]]], limit: float | None = LIMIT_SECONDS
    ) -> list[Any]:
        for line, question in zip(self._lines, questions, strict=False):
            with suppress(OSError):  # the process has died; this is found when its result is read
                line.send(question)
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        waiting = set(range(len(questions)))
        deadline = math.inf if limit is None else time.monotonic() + limit
        while waiting and (ready := wait([self._lines[rank] for rank in waiting], _seconds_until(deadline))):
            for rank in [rank for rank in waiting if self._lines[rank] in ready]:
                waiting.remove(rank)
                try:
                    succeeded, answer = self._lines[rank].recv()
                    (answers if succeeded else failures)[rank] = answer
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE_SECONDS)
                    # Ranks that wait for the dead rank may have reported first: the dead rank goes first.
                    failures = {rank: Failure(_death(self._processes[rank].exitcode)), **failures}
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            rank, failure = min(failures.items(), key=lambda item: item[1].is_echo)
            text = f"rank {rank} of {len(questions)} {failure.reason}"
            raise WorkerError(text, rank, failure.reason, failure.trace)
        if waiting:
            reason = f"did not answer within {limit:g} s"
            raise WorkerError(f"rank {min(waiting)} of {len(questions)} {reason}", min(waiting), reason)
        return [answers[rank] for rank in range(len(questions))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process, line in zip(self._processes, self._lines, strict=True):
            process.join()
            line.close()


def _context() -> Any:
    """Return the multiprocessing context that starts the processes.

    On Linux, a server process loads torch once and forks the ranks, so that many start as fast as one. On other systems
    each process loads torch itself. Nothing is forked from this process, because it may have threads or have used a
    GPU.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.tools.workers", "thinwire.optim"])
    return context


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until all processes are started.

    The processes start with these signals blocked and unblock them when they are ready. They ignore SIGINT: a Ctrl-C on
    the terminal is for the parent alone, which ends them. A thread of a library that has the signals unblocked may
    still receive one for this process. So the handler is delayed too, because it would leave a process half started.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else the first process starts it, and unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    came: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        heard = [one for one in _SIGNALS if callable(signal.getsignal(one))]
        handlers = {one: signal.signal(one, lambda number, _: came.append(number)) for one in heard}
    try:
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in came:
            signal.raise_signal(number)


def is_echo(error: BaseException) -> bool:
    """Return whether a rank raises this error only because another rank failed.

    DDP raises such an error as a RuntimeError with the same text.
    """
    marks = ("all_reduce_compressed #", "Connection closed by peer", "Connection reset by peer")
    text = str(error)
    return isinstance(error, CollectiveError) or (
        isinstance(error, RuntimeError) and any(mark in text for mark in marks)
    )


def _seconds_until(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


def _death(code: int | None) -> str:
    """Describe how a process ended, given its exit code.

    >>> _death(-9), _death(1)
    ('was killed by SIGKILL', 'died with exit code 1')
    """
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"died with exit code {code}"


def _serve(line: Connection, threads: int) -> None:
    """Receive a call, send its result, and repeat until the process is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    actor: object = None
    while True:
        try:
            method, args = line.recv()
        except (EOFError, OSError):  # the parent ended, maybe before its first call
            return
        try:
            if method is None:
                actor = None  # frees its tensors before the next one is built
                actor = _join(*args)
            line.send((True, getattr(actor, method)(*args) if method else None))
        except Exception as error:
            trace = "" if isinstance(error, ValueError | OSError) else traceback.format_exc()
            reason = f"raised {type(error).__name__}: {error}"
            line.send((False, Failure(reason, trace, is_echo(error))))


def _end_with_parent() -> None:
    """Exit when the parent process ends, even while this process waits for another rank."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join(port: int | None, seconds: float, rank: int, size: int, actor: Actor, args: tuple[object, ...]) -> object:
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
    if port is not None:
        limit = timedelta(seconds=seconds)
        store = TCPStore(HOST, port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return actor(rank, size, *args)
