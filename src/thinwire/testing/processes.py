"""Ranks as processes that are kept from test to test.

Starting a process that loads torch takes longer than most tests. So processes are copies of one server that has loaded
it, and a run uses those of the run before. Each run has a gloo group of its own, on a port that the system chose. After
anything but a clean end, all processes that took part are replaced.
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
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Self, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..collectives.transport.channel import close_destroyed

GROUP_TIMEOUT = 60.0
"""Seconds after which torch gives up on an exchange, unless a run says otherwise."""
START_TIMEOUT = 60.0
"""Seconds that a new process may take to load torch; no run's time-out counts them."""
GRACE = 10.0
"""Seconds that the others have to end by themselves once one rank has failed, and that closing a group may take."""
LOG_TAIL = 6000
HOST = "127.0.0.1"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""With it, glibc gives freed memory back at once. Otherwise a test of peak memory sees what earlier tests left."""
PRELOAD = [
    "thinwire.testing.processes",
    "thinwire.optim",
    "thinwire.integrations",
    "thinwire.kernels.cpu.ready",
    "torch._dynamo",
]
"""What the server of ranks loads. DDP imports torch._dynamo, which takes every process more than a second."""


T = TypeVar("T")
_FunctionCache = type(cache(len))
"""What `functools.cache` returns."""


class RankError(Exception):
    """Raised if a rank raised, died, or did not answer. Its text has the traceback of every such rank.

    ranks   the ranks that failed, in the order in which this was seen.
    """

    def __init__(self, ranks: list[int], text: str) -> None:
        super().__init__(text)
        self.ranks = ranks


class Lost:
    """The type of `LOST`."""

    def __repr__(self) -> str:
        return "LOST"


LOST = Lost()
"""Stands in the results for a rank that had to die, and did."""


class Job(NamedTuple):
    """What a process is asked to do."""

    module: str
    function: str
    rank: int
    world_size: int
    args: tuple[Any, ...]
    port: int | None
    """Port of the store. None: this rank hosts the store, and reports its port."""
    group_timeout: float


@cache
def server() -> multiprocessing.context.ForkServerContext:
    """Start the process of which all ranks are copies. It has loaded torch, so that a copy costs milliseconds.

    Python has one such server for a process. Its first user decides what it loads, and in which environment.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with patch.dict(os.environ, ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


class _Process:
    """One process, and the pipe to it."""

    def __init__(self, warnings: str) -> None:
        context = server()
        self.pipe, theirs = context.Pipe()
        self.log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed by `close`
        self.process = context.Process(target=_serve, args=(theirs, self.log.name, warnings), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, message: object) -> None:
        """Send a job, or the word to close."""
        with suppress(OSError):  # that it has died is found when its answer is read
            self.pipe.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """Return the next answer. Raise EOFError if the process has died."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except OSError as error:
            raise EOFError from error

    def written(self) -> str:
        """Return the end of what the process wrote to stdout and stderr."""
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - LOG_TAIL))
        return self.log.read().decode(errors="replace").strip()

    def death(self) -> str:
        """Return how the process, which has died, has ended."""
        self.process.join(GRACE)
        return f"died with exit code {self.process.exitcode}; it wrote\n{self.written()}"

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.wait()
        self.process.close()
        self.pipe.close()
        self.log.close()

    def abort(self) -> None:
        """Let the process write where it stands, and end."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGABRT)

    def wait(self) -> None:
        """Wait until the process, which got a signal, has ended.

        It gets no second SIGABRT, which would cut off the traceback that it writes because of the first.
        """
        self.process.join(GRACE)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(GRACE)


class RankPool:
    """Processes that run a function as the ranks of a gloo group.

    warnings   what a warning does in a rank, as in `warnings.simplefilter`: "error" makes it an exception.

    Processes start when a run first needs them, and end with `close` or the `with` block. A module that defines the
    functions can be a file of tests. A script needs `if __name__ == "__main__":`, as with all of multiprocessing.

    >>> with RankPool() as pool:
    ...     pool.run(divmod, 2)  # function(rank, world_size)
    [(0, 0), (0, 1)]
    """

    def __init__(self, *, warnings: str = "default") -> None:
        self._warnings = warnings
        self._processes: list[_Process] = []

    def run(
        self,
        function: Callable[..., T],
        world_size: int,
        *args: Any,
        timeout: float = GROUP_TIMEOUT,
        store: str = "parent",
        lost: Collection[int] = (),
        group_timeout: float = GROUP_TIMEOUT,
    ) -> list[T]:
        """Call function(rank, world_size, *args) in each rank of a new gloo group. Return the results by rank.

        function        at the top of an importable module. What it takes and returns is pickled.
        timeout         seconds until every rank must have answered.
        store           "parent": this process hosts the group's store, so that no rank's death takes it away.
                        "rank0": rank 0 hosts it, as under torchrun.
        lost            ranks that must die; `LOST` stands for them in the results.
        group_timeout   seconds after which torch gives up on an exchange.

        Raise RankError, with the ranks and their tracebacks, if a rank raises, dies or does not answer.
        """
        if store not in ("parent", "rank0"):
            raise ValueError(f"store {store!r}, expected 'parent' or 'rank0'")
        processes = self._start(world_size)
        server = loopback_store(timedelta(seconds=group_timeout)) if store == "parent" else None
        clean = False
        try:
            job = Job(
                module=function.__module__,
                function=function.__qualname__,
                rank=0,
                world_size=world_size,
                args=args,
                port=None if server is None else server.port,
                group_timeout=group_timeout,
            )
            processes[0].send(job)
            if server is None:
                job = job._replace(port=_collect(processes, timeout, has_answered=range(1, world_size))[0])
            for rank, process in enumerate(processes[1:], start=1):
                process.send(job._replace(rank=rank))
            results = _collect(processes, timeout, lost)
            for rank, process in enumerate(processes):
                if rank not in lost:
                    process.send("close")  # a rank that left earlier would look lost to the ranks that still work
            _collect(processes, GRACE, lost, has_answered=lost)
            clean = not lost
            return results
        finally:
            if not clean:
                self._replace(processes)

    def close(self) -> None:
        """End all processes."""
        self._replace(self._processes[:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, world_size: int) -> list[_Process]:
        new = [_Process(self._warnings) for _ in range(world_size - len(self._processes))]
        self._processes += new
        try:
            _collect(new, START_TIMEOUT)
        except RankError:
            self._replace(new)
            raise
        return self._processes[:world_size]

    def _replace(self, processes: list[_Process]) -> None:
        for process in processes:
            process.close()
            self._processes.remove(process)


def _collect(
    processes: list[_Process], timeout: float, lost: Collection[int] = (), *, has_answered: Collection[int] = ()
) -> list[Any]:
    """Return the answers of all processes, ordered by rank, or raise RankError. In place of a lost rank's is `LOST`."""
    answers: dict[int, Any] = dict.fromkeys(has_answered)
    failures: dict[int, str] = {}
    waiting = set(range(len(processes))) - answers.keys()
    deadline = time.monotonic() + timeout
    while waiting:
        pipes: dict[Any, int] = {processes[rank].pipe: rank for rank in waiting}
        ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
        for rank in [pipes[pipe] for pipe in ready]:
            waiting.remove(rank)
            try:
                succeeded, value = processes[rank].receive()
            except EOFError:
                if rank in lost:
                    answers[rank] = LOST
                else:
                    failures[rank] = processes[rank].death()
                continue
            if not succeeded:
                failures[rank] = f"raised\n{value}"
            elif rank in lost:
                failures[rank] = f"answered {value!r}, expected it to die"
            else:
                answers[rank] = value
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE)
        if not ready and time.monotonic() >= deadline:
            reason = f"did not answer within {timeout:g} s"
            if failures:
                reason = f"did not end within {GRACE:g} s after another rank had failed"
            for rank in waiting:
                processes[rank].abort()  # all at once: the end of one may free another
            for rank in sorted(waiting):
                processes[rank].wait()
                failures[rank] = f"{reason}; it was here\n{processes[rank].written()}"
            break
    if failures:
        text = "\n\n".join(f"rank {rank} of {len(processes)} {what}" for rank, what in failures.items())
        raise RankError(list(failures), text)
    return [answers[rank] for rank in range(len(processes))]


def _serve(pipe: Connection, log: str, on_warning: Any) -> None:
    """Receive a job, send its answer, leave the group when asked to, and repeat until the pipe ends."""
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(written, stream)
    faulthandler.enable()
    warnings.simplefilter(on_warning)  # after the imports: torch's own warnings while it loads do not count
    torch.set_num_threads(1)
    gc.freeze()  # what was loaded stays: or each run would search it for garbage at its end, for a third of a second
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo looks the host's name up, which may take seconds
    with suppress(EOFError, ConnectionError):  # the parent has ended
        _answer(pipe, lambda: None)  # ready
        while True:
            job: Job = pickle.loads(pipe.recv_bytes())
            if _answer(pipe, partial(_work, pipe, job)):
                assert pickle.loads(pipe.recv_bytes()) == "close"
                _answer(pipe, _leave)


def _answer(pipe: Connection, action: Callable[[], Any]) -> bool:
    try:
        data, succeeded = pickle.dumps((True, action())), True
    except Exception:
        data, succeeded = pickle.dumps((False, traceback.format_exc())), False
    if not succeeded:
        # Closes the connections, so that ranks that wait for this one fail at once. Here, since the exception holds
        # what its frames had, and with a DDP model its group.
        with suppress(Exception):
            _leave()
    pipe.send_bytes(data)
    return succeeded


def _work(pipe: Connection, job: Job) -> Any:
    timeout = timedelta(seconds=job.group_timeout)
    if job.port is None:
        store = loopback_store(timeout)
        pipe.send_bytes(pickle.dumps((True, store.port)))
    else:
        store = TCPStore(HOST, job.port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout)
    function = getattr(importlib.import_module(job.module), job.function)
    return function(job.rank, job.world_size, *job.args)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    close_destroyed()
    _forget_meshes()
    gc.collect()
    gc.freeze()  # modules that the job has loaded


def _forget_meshes() -> None:
    """Empty the caches of DTensor, which find a mesh by its shape: they would return one whose groups are destroyed."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            for value in list(vars(module).values()):
                if isinstance(value, _FunctionCache):
                    value.cache_clear()


def loopback_store(timeout: timedelta, host: str = HOST) -> Any:
    """Return a store that listens at one address alone. By itself, torch's listens on all interfaces."""
    with socket.socket() as listening:
        listening.bind((host, 0))
        listening.listen(128)
        port = listening.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),
        )


def store_barrier(label: str, count: int, seconds: float = 60.0) -> None:
    """Wait inside of a run until `count` ranks have called this with the same label.

    It uses the store of the group and no connection between ranks, so it works where exchanges fail.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    if store.add(f"barrier/{label}", 1) == count:
        store.set(f"barrier/{label}/all", "")
    store.wait([f"barrier/{label}/all"], timedelta(seconds=seconds))
