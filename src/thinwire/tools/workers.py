"""Ranks: processes on this machine that form gloo groups and answer questions, none of which waits without an end.

    with Workers(4) as workers:
        workers.form(2, Actor, *args)          # a group of the first two, in each of them an Actor(rank, 2, *args)
        answers = workers.ask("method", *args)     # [actor.method(*args) of each rank]

Questions and answers go through pipes, so that the loopback interface carries what the ranks exchange and nothing else.
What a rank raises, or that it died, is a `WorkerError` that names it. No process outlives the block, or the program.
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
"""For any answer; the first ones load torch, and may compile the kernels, in all processes at once."""
GRACE_SECONDS = 3.0
"""For the answers of the others once one rank has failed: one of them may know better what happened."""
HOST = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Actor = Callable[..., object]


class WorkerError(Exception):
    """A rank raised, died, or did not answer.

    rank     at fault.
    reason   without the rank.
    trace    where it raised, if it did, and was not to blame for it: what ValueError and OSError say is enough.
    """

    def __init__(self, text: str, rank: int | None = None, reason: str = "", trace: str = "") -> None:
        super().__init__(text)
        self.rank, self.reason, self.trace = rank, reason, trace


class Failure(NamedTuple):
    """What a rank answers in place of a result."""

    reason: str
    trace: str = ""
    is_echo: bool = False
    """Of what happened to another rank."""


class Workers:
    """Processes, started at once and ended with the block.

    threads   of torch, in each of them.
    limit     seconds for an exchange between them, after which a rank that does not answer is an error.
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
        """A new group of the first `size` processes, in place of the last one."""
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._make(size, actor, args, self._store.port)

    def make(self, size: int, actor: Actor, *args: object) -> None:
        """As `form`, without a group: actors that know better how to reach each other make it themselves."""
        self._make(size, actor, args, None)

    def _make(self, size: int, actor: Actor, args: tuple[object, ...], port: int | None) -> None:
        self._size = size
        self._question([(None, (port, self._limit, rank, size, actor, args)) for rank in range(size)])

    def ask(self, method: str, *args: object, limit: float | None = LIMIT_SECONDS) -> list[Any]:
        """What this method of the actor returns, by rank; within so many seconds, or whenever it comes."""
        return self._question([(method, args)] * self._size, limit)

    def signal(self, number: signal.Signals) -> None:
        """To all processes that are still there."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _question(
        self, questions: Sequence[tuple[str | None, tuple[object, ...]]], limit: float | None = LIMIT_SECONDS
    ) -> list[Any]:
        for line, question in zip(self._lines, questions, strict=False):
            with suppress(OSError):  # it has died, which is found when its answer is read
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
                    # Those that wait for a rank that died may tell before it shows: it goes first.
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
    """On Linux, processes are copies of one that has loaded torch, so that many start as soon as one; else each loads
    it. Nothing is copied from this process, which may have threads, or have used a GPU."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.tools.workers", "thinwire.optim"])
    return context


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Until all processes are started. They begin with these signals blocked, and listen when they can: a Ctrl-C on the
    terminal is for the parent alone, who ends them. A thread of a library, which has them unblocked, may take one for
    this process: then the handler waits too, or it would leave a process half started."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing would start it with the first process, and unblock them then
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
    """Whether an error is what a rank sees of another's end; DDP passes it on as a RuntimeError with the same text."""
    marks = ("all_reduce_compressed #", "Connection closed by peer", "Connection reset by peer")
    text = str(error)
    return isinstance(error, CollectiveError) or (
        isinstance(error, RuntimeError) and any(mark in text for mark in marks)
    )


def _seconds_until(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


def _death(code: int | None) -> str:
    """
    >>> _death(-9), _death(1)
    ('was killed by SIGKILL', 'died with exit code 1')
    """
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"died with exit code {code}"


def _serve(line: Connection, threads: int) -> None:
    """The life of a process: a question, its answer, and again until it is ended."""
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
        except (EOFError, OSError):  # the parent is gone, or was stopped before it began
            return
        try:
            if method is None:
                actor = None  # its tensors, before the next one makes its own
                actor = _join(*args)
            line.send((True, getattr(actor, method)(*args) if method else None))
        except Exception as error:
            trace = "" if isinstance(error, ValueError | OSError) else traceback.format_exc()
            reason = f"raised {type(error).__name__}: {error}"
            line.send((False, Failure(reason, trace, is_echo(error))))


def _end_with_parent() -> None:
    """Even if it is killed while this process waits for another."""
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
