"""Ranks: processes on this machine that form gloo groups and answer questions, none of which waits without an end.

    with Workers(4) as workers:
        workers.form(2, Actor, *args)          # a group of the first two, in each of them an Actor(rank, 2, *args)
        answers = workers.ask("method", *args)     # [actor.method(*args) of each rank]

Questions and answers go through pipes, so that the loopback interface carries what the ranks exchange and nothing else.
What a rank raises, or that it died, is a `WorkerError` that names it. No process outlives the block, or the program.
"""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

LIMIT_SECONDS = 300.0
"""For any answer; the first ones load torch, and may compile the kernels, in all processes at once."""
GRACE_SECONDS = 3.0
"""For the answers of the others once one rank has failed: one of them may know better what happened."""
HOST = "127.0.0.1"

Actor = Callable[..., object]


class WorkerError(Exception):
    """A rank raised, died, or did not answer."""


class Workers:
    """Processes, started at once and ended with the block."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        self._processes = []
        self._size = 0
        self._store: Any = None
        for _ in range(count):
            line, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(line)
            self._processes.append(process)

    def form(self, size: int, actor: Actor, *args: object) -> None:
        """A new group of the first `size` processes, in place of the last one."""
        self._size = size
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._question([(None, (self._store.port, rank, size, actor, args)) for rank in range(size)])

    def ask(self, method: str, *args: object) -> list[Any]:
        """What this method of the actor returns, by rank."""
        return self._question([(method, args)] * self._size)

    def _question(self, questions: Sequence[tuple[str | None, tuple[object, ...]]]) -> list[Any]:
        for line, question in zip(self._lines, questions, strict=False):
            with suppress(OSError):  # it has died, which is found when its answer is read
                line.send(question)
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = set(range(len(questions)))
        deadline = time.monotonic() + LIMIT_SECONDS
        while waiting and (ready := wait([self._lines[rank] for rank in waiting], deadline - time.monotonic())):
            for rank in [rank for rank in waiting if self._lines[rank] in ready]:
                waiting.remove(rank)
                try:
                    succeeded, answer = self._lines[rank].recv()
                    (answers if succeeded else failures)[rank] = answer
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE_SECONDS)
                    # Those that wait for a rank that died may tell before it shows: it goes first.
                    failures = {rank: f"died with exit code {self._processes[rank].exitcode}", **failures}
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            rank, reason = next(iter(failures.items()))
            raise WorkerError(f"rank {rank} of {len(questions)} {reason}")
        if waiting:
            raise WorkerError(f"rank {min(waiting)} of {len(questions)} did not answer within {LIMIT_SECONDS:g} s")
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


def _serve(line: Connection) -> None:
    """The life of a process: a question, its answer, and again until it is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    actor: object = None
    while True:
        method, args = line.recv()
        try:
            if method is None:
                actor = None  # its tensors, before the next one makes its own
                actor = _join(*args)
            line.send((True, getattr(actor, method)(*args) if method else None))
        except Exception as error:
            line.send((False, f"raised {type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """Even if it is killed while this process waits for another."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join(port: int, rank: int, size: int, actor: Actor, args: tuple[object, ...]) -> object:
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
    limit = timedelta(seconds=LIMIT_SECONDS)
    store = TCPStore(HOST, port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return actor(rank, size, *args)
