"""Processes on this machine that form gloo process groups and run the methods that the parent calls.

    with Workers(4) as workers:
        workers.form(2, RankClass, *args)          # a group of the first two; each builds RankClass(rank, 2, *args)
        answers = workers.ask("method", *args)     # [object.method(*args) of each rank]

The ranks exchange through the loopback interface, or through links of a given rate. Calls and results go through pipes,
so that interface and links carry only what the ranks exchange. If a rank raises an exception or dies, the parent raises
a `WorkerError` with its rank. No process outlives the `with` block or the program.
"""

import gc
import math
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ..collectives import CollectiveError
from ..testing.processes import HOST, loopback_store
from . import fork_server
from .links import Links

LIMIT_SECONDS = 300.0
"""Default time limit for a result. First calls load torch, and may compile the kernels, in all processes at once."""
GRACE_SECONDS = 3.0
"""Time limit for the other results once one rank has failed. One of them may name the cause."""

RankClass = Callable[..., object]


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
    is_consequence: bool = False
    """Whether the call failed only because another rank failed."""


class Workers:
    """Processes that start together and end with the `with` block.

    threads   number of torch threads in each process.
    limit     timeout of the process group in seconds; an exchange with a rank that does not answer then fails.
    links     links between the ranks; None for the loopback interface.
    """

    def __init__(self, count: int, threads: int = 1, limit: float = LIMIT_SECONDS, links: Links | None = None) -> None:
        self._limit, self._links = limit, links
        context = fork_server.context()
        self._pipes: list[Connection] = []
        self._processes = []
        self._size = 0
        self._store: Any = None
        with fork_server.signals_wait():
            for rank in range(count):
                pipe, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, threads, rank, limit, links), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(pipe)
                self._processes.append(process)

    def form(self, size: int, rank_class: RankClass, *args: object) -> None:
        """Form a process group of the first `size` processes, and build `rank_class(rank, size, *args)` in each.

        The new group replaces the previous one.
        """
        if self._links is None:
            self._store = loopback_store(timedelta(seconds=self._limit))
            port = self._store.port
        else:  # this process cannot be reached through the links
            port = self._set_up(size, _Rank.host)[0]
        # Other programs of this machine can reach the store, but cannot guess its keys: what they write there is not
        # read, unless they ask the store for its keys first.
        self._set_up(size, _Rank.join, size, port, secrets.token_hex(16))
        self.make(size, rank_class, *args)

    def make(self, size: int, rank_class: RankClass, *args: object) -> None:
        """Build `rank_class(rank, size, *args)` in the first `size` processes, without forming a process group.

        Use it for a class that forms the process group itself.
        """
        self._set_up(size, _Rank.build, size, rank_class, args)

    def _set_up(self, size: int, method: Callable[..., object], *args: object) -> list[Any]:
        self._size = size
        return self.ask(method, *args, limit=max(LIMIT_SECONDS, self._limit))  # the group's limit: it is formed now

    def ask(self, method: str | Callable[..., object], *args: object, limit: float | None = LIMIT_SECONDS) -> list[Any]:
        """Call this method on every rank and return the results, ordered by rank.

        method   name of a method of the object that was built. (`form` and `make` give methods of `_Rank`.)
        limit    seconds to wait for the results; None waits without a limit.
        """
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes[: self._size])}
        for pipe in waiting:
            with suppress(OSError):  # the process has died; this is found when its result is read
                pipe.send((method, args))
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        deadline = math.inf if limit is None else time.monotonic() + limit
        while waiting:
            seconds = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            ready: list[Any] = wait(list(waiting), seconds)
            if not ready:
                break
            for rank, pipe in sorted((waiting.pop(pipe), pipe) for pipe in ready):
                try:
                    succeeded, answer = pipe.recv()
                    (answers if succeeded else failures)[rank] = answer
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE_SECONDS)
                    # Ranks that wait for the dead rank may have reported first: the dead rank goes first.
                    failures = {rank: Failure(_death(self._processes[rank].exitcode)), **failures}
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting and not failures:
            failures[min(waiting.values())] = Failure(f"did not answer within {limit:g} s")
        if failures:
            rank, failure = min(failures.items(), key=lambda item: item[1].is_consequence)
            text = f"rank {rank} of {self._size} {failure.reason}"
            raise WorkerError(text=text, rank=rank, reason=failure.reason, trace=failure.trace)
        return [answers[rank] for rank in range(self._size)]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process that is still alive."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()


def is_consequence(error: BaseException) -> bool:
    """Return whether a rank raises this error only because another rank failed.

    DDP raises such an error as a RuntimeError with the same text.
    """
    marks = ("all_reduce_compressed #", "Connection closed by peer", "Connection reset by peer")
    text = str(error)
    return isinstance(error, CollectiveError) or (
        isinstance(error, RuntimeError) and any(mark in text for mark in marks)
    )


def _death(code: int | None) -> str:
    """Describe how a process ended, given its exit code.

    >>> _death(-9), _death(1)
    ('was killed by SIGKILL', 'died with exit code 1')
    """
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"died with exit code {code}"


class _Rank:
    """A rank in its process: its process group, and the object whose methods are called."""

    def __init__(self, rank: int, limit: float, links: Links | None) -> None:
        self._rank, self._limit, self._links = rank, timedelta(seconds=limit), links
        self._store: Any = None
        self.built: object = None
        if links is not None:
            links.enter(rank)

    def host(self) -> int:
        """Start the store of the next group on rank 0 and return its port. Return 0 on all other ranks."""
        if self._rank:
            return 0
        assert self._links is not None
        self._store = loopback_store(self._limit, self._links.address(0))
        return int(self._store.port)

    def join(self, size: int, port: int, secret: str) -> None:
        """Leave the group, if there is one, and join the next one."""
        self.built = None  # frees its tensors
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()
        host, port = (HOST, port) if self._links is None else self._links.reach(self._rank, 0, port)
        store = self._store or TCPStore(host, port, is_master=False, timeout=self._limit)
        dist.init_process_group(
            "gloo", store=PrefixStore(secret, store), rank=self._rank, world_size=size, timeout=self._limit
        )

    def build(self, size: int, rank_class: RankClass, args: tuple[object, ...]) -> None:
        """Build the object whose methods are called from now on."""
        self.built = None  # frees its tensors before the next one is built
        self.built = rank_class(self._rank, size, *args)


def _serve(pipe: Connection, threads: int, rank: int, limit: float, links: Links | None) -> None:
    """Receive a call, send its result, and repeat until the process is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, fork_server.SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    gc.freeze()  # what was loaded stays: no search for garbage has to go through it
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    served = _Rank(rank, limit, links)
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, OSError):  # the parent ended, maybe before its first call
            return
        try:
            called = getattr(served.built, method) if isinstance(method, str) else partial(method, served)
            pipe.send((True, called(*args)))
        except Exception as error:
            trace = "" if isinstance(error, ValueError | OSError) else traceback.format_exc()
            reason = f"raised {type(error).__name__}: {error}"
            pipe.send((False, Failure(reason, trace, is_consequence(error))))


def _end_with_parent() -> None:
    """Exit when the parent process ends, even while this process waits for another rank."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
