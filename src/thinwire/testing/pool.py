"""Ranks as processes of this machine: the one way in which tests, `thinwire train` and benchmarks start them.

RankPool   runs a function as the ranks of a gloo group. Its processes are kept from run to run, what they write is kept
           for errors, and after anything but a clean end, all processes that took part are replaced. For tests.
Workers    builds an object in each rank and calls its methods. Ranks write where the program writes. For programs.

Processes are copies of one that has loaded torch (see `server`). Ranks exchange through the loopback interface, or
through links of a given rate; calls and results go through pipes. No process outlives the program.
"""

import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ..collectives import CollectiveError
from ..collectives.transport.channel import close_destroyed
from . import server

HOST = "127.0.0.1"
TIMEOUT = 60.0
"""Seconds for a run of `RankPool`, for an exchange in it unless the run says otherwise, and for a process to start."""
LIMIT_SECONDS = 300.0
"""Default time limit of `Workers`. First calls may compile the kernels, in all processes at once."""
GRACE = 10.0
"""Seconds that other ranks have to end by themselves once one has failed, and that closing a group may take."""
LOG_TAIL = 6000
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""Of the server of a `RankPool`. glibc then gives freed memory back at once, or tests would see it in peaks."""

T = TypeVar("T")
RankClass = Callable[..., object]


class RankError(Exception):
    """Raised if a rank raised, died, or did not answer. The rank that caused the failure of others comes first.

    ranks    the ranks that failed.
    reason   what happened to the first of them, without its rank.
    trace    its traceback; empty if it died, or raised a ValueError or OSError, whose message is enough.
    """

    def __init__(self, text: str, ranks: Iterable[int] = (), reason: str = "", trace: str = "") -> None:
        super().__init__(text)
        self.ranks, self.reason, self.trace = list(ranks), reason, trace


class Lost(Enum):
    """The type of `LOST`, which stands in the results for a rank that had to die, and did."""

    LOST = "LOST"


LOST = Lost.LOST


class _Failure(NamedTuple):
    """A failed call. A rank sends it in place of a result."""

    reason: str
    trace: str = ""
    is_consequence: bool = False  # Whether the call failed only because another rank failed
    is_bug: bool = False


class _Process(NamedTuple):
    """The process of one rank, the pipe to it, and the file with what it writes, if that is kept."""

    process: Any
    pipe: Any
    log: Any

    def ending(self, how: str = "") -> _Failure:
        """Wait for the end of the process, and return how it ended, by itself or as given, and what it wrote last."""
        self.process.join(GRACE)
        code, killed_by = self.process.exitcode, {-number: number.name for number in signal.Signals}
        ended = f"was killed by {killed_by[code]}" if code in killed_by else f"died with exit code {code}"
        if self.log is None:
            return _Failure(how or ended)
        written = self.log.read()[-LOG_TAIL:].decode(errors="replace").strip()
        return _Failure(f"{how}; it was here\n{written}" if how else f"{ended}; it wrote\n{written}")


class Workers:
    """Processes that start together and end with the `with` block.

    threads    number of torch threads in each process.
    limit      timeout of the process group in seconds; an exchange with a rank that does not answer then fails.
    links      links between the ranks, as of `thinwire.tools.links`; None for the loopback interface.
    warnings   what a warning does in a rank, as in `warnings.simplefilter`; None leaves it as it is.

        with Workers(4) as workers:
            workers.form(2, RankClass, *args)          # a group of the first two; each builds RankClass(rank, 2, *args)
            answers = workers.ask("method", *args)     # [object.method(*args) of each rank]

    What a rank raises is raised here, as a `RankError` with its rank.
    """

    _grace = 3.0  # Seconds that other ranks have to answer once one has failed
    _keeps_log = False
    """Whether to keep what a rank writes, for errors, which then are about all ranks that failed. A rank also leaves
    its group when a call fails, so that ranks that wait for it fail at once."""

    def __init__(
        self, count: int, threads: int = 1, limit: float = LIMIT_SECONDS, links: Any = None, warnings: str | None = None
    ) -> None:
        self._settings, self._limit, self._size = (threads, links, warnings), limit, 0
        self._processes: dict[int, _Process] = {}
        self._store: Any = None
        self._start(count)

    def form(self, size: int, rank_class: RankClass, *args: object) -> None:
        """Form a process group of the first `size` processes, and build `rank_class(rank, size, *args)` in each.

        The new group replaces the previous one.
        """
        limit, self._size = max(LIMIT_SECONDS, self._limit), size
        # Links do not lead to this process: rank 0 hosts the store then.
        self._join(size, self._limit, limit, on_rank0=self._settings[1] is not None)
        self._call(range(size), "build", rank_class, size, *args, limit=limit)

    def ask(self, method: str, *args: object, limit: float | None = LIMIT_SECONDS) -> list[Any]:
        """Call this method of the object on every rank and return the results, ordered by rank.

        limit   seconds to wait for the results; None waits without a limit.
        """
        return self._call(range(self._size), "ask", method, *args, limit=limit)

    def _start(self, size: int) -> list[int]:
        """Start the processes of the first `size` ranks that do not run. Return these ranks."""
        new = [rank for rank in range(size) if rank not in self._processes]
        context = server.context()
        with server.signals_wait():
            for rank in new:
                pipe, theirs = context.Pipe()
                log = tempfile.NamedTemporaryFile() if self._keeps_log else None  # noqa: SIM115 - closed by `close`
                given = theirs, rank, log and log.name, *self._settings
                process = context.Process(target=_serve, args=given, daemon=True)
                process.start()
                theirs.close()
                self._processes[rank] = _Process(process, pipe, log)
        return new

    def _join(self, size: int, timeout: float, limit: float, *, on_rank0: bool) -> None:
        """Form a gloo group of the first `size` ranks, in place of the one they have.

        timeout    seconds after which torch gives up on an exchange.
        on_rank0   whether rank 0 hosts the group's store, in place of this process.
        """
        if on_rank0:
            (port,) = self._call([0], "host", timeout, limit=limit)
        else:
            self._store = loopback_store(timedelta(seconds=timeout))
            port = self._store.port
        # Other programs of this machine can reach the store, but cannot guess its keys: what they write there is not
        # read, unless they ask the store for its keys first.
        self._call(range(size), "join", size, port, secrets.token_hex(16), timeout, limit=limit)

    def _call(
        self, ranks: Collection[int], method: str, *args: object, limit: float | None, lost: Collection[int] = ()
    ) -> list[Any]:
        """Call a method of `_Rank` in each of these ranks. Return the results in their order, or raise RankError.

        limit   seconds to wait for the results; None waits without a limit.
        lost    ranks that must die; the result of one is `LOST`.
        """
        message = pickle.dumps((method, args))
        waiting: dict[Any, int] = {self._processes[rank].pipe: rank for rank in ranks}
        for pipe in waiting:
            with suppress(OSError):  # that the process has died is found when its answer is read
                pipe.send_bytes(message)
        answers: dict[int, Any] = {}
        deadline = math.inf if limit is None else time.monotonic() + limit
        while waiting:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            ready: list[Any] = wait(list(waiting), left)
            if not ready:
                break
            for rank, pipe in [(waiting.pop(pipe), pipe) for pipe in ready]:
                try:
                    answer = pickle.loads(pipe.recv_bytes())
                    if rank in lost and not isinstance(answer, _Failure):
                        answer = _Failure(f"answered {answer!r}, expected it to die")
                except (EOFError, OSError):
                    answer = LOST if rank in lost else self._processes[rank].ending()
                answers[rank] = answer
                if isinstance(answer, _Failure):
                    deadline = min(deadline, time.monotonic() + self._grace)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, _Failure)}
        if waiting or failures:
            raise self._error(failures, sorted(waiting.values()), size=len(ranks), limit=limit)
        return [answers[rank] for rank in ranks]

    def _error(self, failures: dict[int, _Failure], late: list[int], *, size: int, limit: float | None) -> RankError:
        """Return the error of ranks that failed, and of those that are late; these write where they are, and end."""
        # Ranks that wait for one that died may have reported first: that one goes first.
        ranks = sorted(failures, key=lambda rank: (failures[rank].is_consequence, bool(failures[rank].trace))) + late
        after = f"did not end within {self._grace:g} s after another rank had failed"
        how = after if failures else f"did not answer within {limit:g} s"
        if self._keeps_log:
            self.signal(signal.SIGABRT, late)  # all at once: the end of one may free another
        failures |= {rank: self._processes[rank].ending(how) if self._keeps_log else _Failure(how) for rank in late}
        first = failures[ranks[0]]
        texts = [f"rank {ranks[0]} of {size} {first.reason}"]
        if self._keeps_log:
            what = {rank: f"raised\n{one.trace}" if one.trace else one.reason for rank, one in failures.items()}
            texts = [f"rank {rank} of {size} {what[rank]}" for rank in ranks]
        return RankError("\n\n".join(texts), ranks, first.reason, first.trace if first.is_bug else "")

    def signal(self, number: signal.Signals, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to every process that is still alive, or to those of these ranks."""
        for process in [self._processes[rank].process for rank in (self._processes if ranks is None else ranks)]:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def close(self, ranks: Collection[int] | None = None) -> None:
        """End all processes, or those of these ranks."""
        ended = [self._processes.pop(rank) for rank in [*self._processes] if ranks is None or rank in ranks]
        for process, _, _ in ended:
            process.kill()
        for process, pipe, log in ended:
            process.join(GRACE)
            process.close()
            pipe.close()
            if log is not None:
                log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RankPool(Workers):
    """Processes that run a function as the ranks of a gloo group.

    warnings   what a warning does in a rank, as in `warnings.simplefilter`: "error" makes it an exception.

    Processes start when a run first needs them, and end with `close` or the `with` block. A module that defines the
    functions can be a file of tests. A script needs `if __name__ == "__main__":`, as with all of multiprocessing.

    >>> with RankPool() as pool:
    ...     pool.run(divmod, 2)  # function(rank, world_size)
    [(0, 0), (0, 1)]
    """

    _grace, _keeps_log = GRACE, True

    def __init__(self, *, warnings: str = "default") -> None:
        super().__init__(0, warnings=warnings)

    def run(
        self,
        function: Callable[..., T],
        world_size: int,
        *args: Any,
        timeout: float = TIMEOUT,
        store: str = "parent",
        lost: Collection[int] = (),
        group_timeout: float = TIMEOUT,
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
        ranks, clean = range(world_size), False
        try:
            server.start(ENVIRONMENT)
            self._call(self._start(world_size), "leave", limit=TIMEOUT)  # answered when a process has loaded torch
            self._join(world_size, group_timeout, timeout, on_rank0=store == "rank0")
            results = self._call(ranks, "run", function, world_size, *args, limit=timeout, lost=lost)
            # All at the end: a rank that left earlier would look lost to the ranks that still work.
            self._call([rank for rank in ranks if rank not in lost], "leave", limit=GRACE)
            clean = not lost
            return results
        finally:
            if not clean:
                self.close(ranks)


def is_consequence(error: BaseException) -> bool:
    """Return whether a rank raises this error only because another rank failed.

    DDP raises such an error as a RuntimeError with the same text.
    """
    marks = ("all_reduce_compressed #", "Connection closed by peer", "Connection reset by peer")
    is_marked = isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)
    return is_marked or isinstance(error, CollectiveError)


class _Rank:
    """A rank in its process: its process group, and the object whose methods are called."""

    def __init__(self, rank: int, links: Any) -> None:
        self._rank, self._links = rank, links
        self._store: Any = None
        self._built: object = None
        if links is not None:
            links.enter(rank)

    def host(self, timeout: float) -> int:
        """Start the store of the next group and return its port."""
        host = HOST if self._links is None else self._links.address(self._rank)
        self._store = loopback_store(timedelta(seconds=timeout), host)
        return int(self._store.port)

    def join(self, size: int, port: int, secret: str, timeout: float) -> None:
        """Leave the group, if there is one, and join the next one."""
        self.leave()
        limit, (store, self._store) = timedelta(seconds=timeout), (self._store, None)
        if store is None:
            host, port = (HOST, port) if self._links is None else self._links.reach(self._rank, 0, port)
            store = TCPStore(host, port, is_master=False, timeout=limit)
        store = PrefixStore(secret, store)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=size, timeout=limit)

    def leave(self) -> None:
        """Leave the group, if there is one, and free what belongs to it."""
        self._built = None
        if dist.is_initialized():
            dist.destroy_process_group()
        close_destroyed()
        _forget_meshes()
        gc.collect()
        gc.freeze()  # modules that were loaded since

    def run(self, function: Callable[..., T], size: int, *args: object) -> T:
        return function(self._rank, size, *args)

    def build(self, rank_class: RankClass, size: int, *args: object) -> None:
        self._built = self.run(rank_class, size, *args)

    def ask(self, method: str, *args: object) -> Any:
        return getattr(self._built, method)(*args)

    def answer(self, call: bytes) -> tuple[bytes, bool]:
        """Return what to send as the answer to a call, and whether the call has succeeded."""
        try:
            method, args = pickle.loads(call)
            return pickle.dumps(getattr(self, method)(*args)), True
        except Exception as error:
            reason, is_bug = f"raised {type(error).__name__}: {error}", not isinstance(error, ValueError | OSError)
            return pickle.dumps(_Failure(reason, traceback.format_exc(), is_consequence(error), is_bug)), False


def _serve(pipe: Connection, rank: int, log: str | None, threads: int, links: Any, on_warning: Any) -> None:
    """Receive a call, send its result, and repeat until the process is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C on the terminal is for the parent, which ends the ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, server.SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if log is not None:
        written = os.open(log, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(written, stream)
        faulthandler.enable()
    if on_warning is not None:
        warnings.simplefilter(on_warning)  # after the imports: torch's own warnings while it loads do not count
    torch.set_num_threads(threads)
    gc.freeze()  # what was loaded stays: or each search for garbage would go through it, for a third of a second
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks the host's name up, which may take seconds
    served = _Rank(rank, links)
    with suppress(EOFError, ConnectionError):  # the parent has ended, maybe before its first call
        while True:
            data, succeeded = served.answer(pipe.recv_bytes())
            if not succeeded and log is not None:
                with suppress(Exception):  # not in `answer`: what a frame holds, such as a DDP model, holds the group
                    served.leave()
            pipe.send_bytes(data)


def _end_with_parent() -> None:
    """Exit when the parent process ends, even while this process waits for another rank."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _forget_meshes() -> None:
    """Empty the caches of DTensor, which find a mesh by its shape: they would return one whose groups are destroyed."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            for value in list(vars(module).values()):
                if isinstance(value, type(cache(len))):
                    value.cache_clear()


def loopback_store(timeout: timedelta, host: str = HOST) -> Any:
    """Return a store that listens at one address alone. By itself, torch's listens on all interfaces."""
    with socket.create_server((host, 0), backlog=128) as listening:
        port, opened = listening.getsockname()[1], listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=opened)


def store_barrier(label: str, count: int, seconds: float = 60.0) -> None:
    """Wait inside of a run until `count` ranks have called this with the same label.

    It uses the store of the group and no connection between ranks, so it works where exchanges fail.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    if store.add(f"barrier/{label}", 1) == count:
        store.set(f"barrier/{label}/all", "")
    store.wait([f"barrier/{label}/all"], timedelta(seconds=seconds))
