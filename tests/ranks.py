"""Ranks for tests: real processes, a real gloo group for every run, and no wait without an end.

    results = ranks.run(function, 4, *args)      # [function(rank, 4, *args) of each rank]

The processes are kept from one run to the next, since starting them takes longer than most tests; the process group is
not: each run has one of its own, on a port that the system chose. What a rank raises reaches the test as a `RankError`
with its rank and its traceback. A rank that dies or does not answer is reported with what it wrote and where it stood.
After anything but a clean end all processes that took part are replaced.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

GROUP_TIMEOUT = 60.0
"""Seconds after which torch gives up on an exchange, unless a run says otherwise."""
START_TIMEOUT = 60.0
"""Seconds that a new process may take to load torch; no run's time-out counts them."""
GRACE = 10.0
"""Seconds that the others have to end by themselves once one rank has failed, and that closing a group may take."""
LOG_TAIL = 6000
HOST = "127.0.0.1"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc then gives freed memory back at once: else what a call takes at its peak is in what earlier calls left."""
PRELOAD = ["ranks", "thinwire.optim", "thinwire.integrations", "thinwire.kernels.cpu"]


class RankError(Exception):
    """A rank raised, died, or did not answer; `ranks` are those at fault, in the order in which it showed."""

    def __init__(self, ranks: list[int], text: str) -> None:
        super().__init__(text)
        self.ranks = ranks


class Lost:
    """Stands in the results for a rank that was meant to die, and did."""


LOST = Lost()


class Job(NamedTuple):
    module: str
    function: str
    rank: int
    world_size: int
    args: tuple[Any, ...]
    port: int | None
    """None: this rank hosts the store, and tells on which port."""
    group_timeout: float


@cache
def server() -> multiprocessing.context.ForkServerContext:
    """A process that has loaded torch once, and of which workers are copies: each of them costs milliseconds.

    A process has one such server: whoever asks for it first decides what it loads, and in which environment.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


class Worker:
    """One process, and the line to it."""

    def __init__(self) -> None:
        context = server()
        self.line, theirs = context.Pipe()
        self.log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed by `close`
        self.process = context.Process(target=serve, args=(theirs, self.log.name), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, message: object) -> None:
        with suppress(OSError):  # that it has died is found when its answer is read
            self.line.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """The next answer; `EOFError` if there will be none."""
        try:
            return pickle.loads(self.line.recv_bytes())
        except OSError as error:
            raise EOFError from error

    def written(self) -> str:
        """The end of what the process wrote."""
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - LOG_TAIL))
        return self.log.read().decode(errors="replace").strip()

    def close(self) -> None:
        self.process.kill()
        self.wait()
        self.process.close()
        self.line.close()
        self.log.close()

    def wait(self) -> None:
        """Until the process, which was told to end, has ended. No second SIGABRT: it would cut off what the first
        makes the process write, where it stands."""
        self.process.join(GRACE)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(GRACE)


class Ranks:
    """The pool. Processes start when a run first needs them."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = GROUP_TIMEOUT,
        store: str = "parent",
        lost: Collection[int] = (),
        group_timeout: float = GROUP_TIMEOUT,
    ) -> list[Any]:
        """What function(rank, world_size, *args) returns on each rank of a fresh gloo group.

        function  at the top of an importable module; what it takes and returns is pickled.
        timeout   seconds until every rank must have answered.
        store     "parent": the test's process hosts it, so that no rank's death takes it away; "rank0": rank 0 does.
        lost      ranks that must die; `LOST` stands for them in the results.
        """
        assert store in ("parent", "rank0"), store
        workers = self._start(world_size)
        server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False) if store == "parent" else None
        clean = False
        try:
            run = _Run(workers, set(lost), time.monotonic() + timeout, timeout)
            job = Job(function.__module__, function.__qualname__, 0, world_size, args, None, group_timeout)
            port = server.port if server else run.port_of_rank_0(job)
            for rank, worker in enumerate(workers):
                if server or rank:
                    worker.send(job._replace(rank=rank, port=port))
            results = run.results()
            run.close()
            clean = not lost
            return results
        finally:
            if not clean:
                self._replace(workers)

    def close(self) -> None:
        self._replace(self._workers[:])

    def _start(self, world_size: int) -> list[Worker]:
        new = [Worker() for _ in range(world_size - len(self._workers))]
        self._workers += new
        started = _Run(new, set(), time.monotonic() + START_TIMEOUT, START_TIMEOUT)
        try:
            started.results()
        except RankError:
            self._replace(new)
            raise
        return self._workers[:world_size]

    def _replace(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.close()
            self._workers.remove(worker)


class _Run:
    """The test's side of one run."""

    def __init__(self, workers: list[Worker], lost: set[int], deadline: float, timeout: float) -> None:
        self.workers, self.lost, self.deadline, self.timeout = workers, lost, deadline, timeout
        self.failures: dict[int, str] = {}

    def port_of_rank_0(self, job: Job) -> int:
        self.workers[0].send(job)
        lost, self.lost = self.lost, set()  # it may die later, but not before it has told
        answers = self._collect({0}, self.deadline)
        self._raise_failures()
        self.lost = lost
        return int(answers[0])

    def results(self) -> list[Any]:
        answers = self._collect(set(range(len(self.workers))), self.deadline)
        self._raise_failures()
        return [answers[rank] for rank in range(len(self.workers))]

    def close(self) -> None:
        """Only now may the groups go: a rank that left earlier would look lost to those who are not done."""
        alive = set(range(len(self.workers))) - self.lost
        for rank in alive:
            self.workers[rank].send("close")
        self.timeout = GRACE
        self._collect(alive, time.monotonic() + GRACE)
        self._raise_failures()

    def _collect(self, waiting: set[int], deadline: float) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        while waiting:
            lines = {self.workers[rank].line: rank for rank in waiting}
            ready = wait(list(lines), max(0.0, deadline - time.monotonic()))
            for line in ready:
                rank = lines[line]
                waiting.remove(rank)
                self._take(rank, answers)
            if self.failures:
                deadline = min(deadline, time.monotonic() + GRACE)
            if not ready and time.monotonic() >= deadline:
                reason = f"did not answer within {self.timeout:g} s"
                if self.failures:
                    reason = f"did not end within {GRACE:g} s after another rank had failed"
                for rank in waiting:
                    os.kill(self.workers[rank].process.pid, signal.SIGABRT)  # all at once: one's end may free another
                for rank in sorted(waiting):
                    self.workers[rank].wait()
                    self.failures[rank] = f"{reason}; it stood here\n{self.workers[rank].written()}"
                break
        return answers

    def _take(self, rank: int, answers: dict[int, Any]) -> None:
        worker = self.workers[rank]
        try:
            succeeded, value = worker.receive()
        except EOFError:
            worker.process.join(GRACE)
            if rank in self.lost:
                answers[rank] = LOST
            else:
                code = worker.process.exitcode
                self.failures[rank] = f"died with exit code {code}; it wrote\n{worker.written()}"
            return
        if rank in self.lost and succeeded:
            self.failures[rank] = f"answered {value!r}, expected it to die"
        elif succeeded:
            answers[rank] = value
        else:
            self.failures[rank] = f"raised\n{value}"

    def _raise_failures(self) -> None:
        if self.failures:
            world = len(self.workers)
            text = "\n\n".join(f"rank {rank} of {world} {what}" for rank, what in self.failures.items())
            raise RankError(list(self.failures), text)


def serve(line: Connection, log: str) -> None:
    """The life of a process: a job, its answer, the word to close, and again until the line ends."""
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(written, stream)
    faulthandler.enable()
    warnings.simplefilter("error")  # after the imports: what torch warns of while it loads is not for us to mend
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo looks the host's name up, which may take seconds
    with suppress(EOFError, ConnectionError):  # the test's process is gone
        _answer(line, lambda: None)  # ready
        while True:
            job: Job = pickle.loads(line.recv_bytes())
            if _answer(line, lambda job=job: _work(line, job)):
                assert pickle.loads(line.recv_bytes()) == "close"
                _answer(line, _leave)


def _answer(line: Connection, action: Callable[[], Any]) -> bool:
    try:
        data, succeeded = pickle.dumps((True, action())), True
    except Exception:
        data, succeeded = pickle.dumps((False, traceback.format_exc())), False
        with suppress(Exception):
            _leave()  # closes the connections, so that those who wait for this rank learn of it
    line.send_bytes(data)
    return succeeded


def _work(line: Connection, job: Job) -> Any:
    timeout = timedelta(seconds=job.group_timeout)
    hosts = job.port is None
    server = dist.TCPStore(HOST, job.port or 0, is_master=hosts, wait_for_workers=False, timeout=timeout)
    if hosts:
        line.send_bytes(pickle.dumps((True, server.port)))
    dist.init_process_group("gloo", store=server, rank=job.rank, world_size=job.world_size, timeout=timeout)
    function = getattr(importlib.import_module(job.module), job.function)
    return function(job.rank, job.world_size, *job.args)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def meet(label: str, count: int, seconds: float = 60.0) -> None:
    """Called inside a run: go on once `count` ranks are here. Goes by the store, so it stands when exchanges fail."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"meet/{label}", 1) == count:
        store.set(f"meet/{label}/all", "")
    store.wait([f"meet/{label}/all"], timedelta(seconds=seconds))
