"""The server of ranks: a process that loads torch once, and of which each rank is a copy.

This module does not load torch, so that a program can start the server first, and both load it at the same time.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PRELOAD = [
    "thinwire.testing.pool",
    "thinwire.optim",
    "thinwire.integrations",
    "thinwire.kernels.cpu.ready",
    "torch._dynamo",
]
"""What the server loads. DDP imports torch._dynamo, which takes a second."""


def context() -> Any:
    """Return the multiprocessing context that starts the processes.

    On Linux, a server process loads torch once and forks the ranks, so that many start as fast as one. On other systems
    each process loads torch itself. Nothing is forked from this process, because it may have threads or have used a
    GPU.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def start(environment: Mapping[str, str] | None = None) -> None:
    """Start the server, if this system has one and it does not run yet. Otherwise the first rank starts it.

    environment   variables that it has besides those of this process. A process has one server, so the first start
                  decides.
    """
    from unittest.mock import patch  # which `thinwire --help` need not load

    if context().get_start_method() == "forkserver":
        with signals_wait(), patch.dict(os.environ, environment or {}):
            multiprocessing.forkserver.ensure_running()


@contextmanager
def signals_wait() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until all processes are started.

    The processes start with these signals blocked and unblock them when they are ready. They ignore SIGINT: a Ctrl-C on
    the terminal is for the parent alone, which ends them. A thread of a library that has the signals unblocked may
    still receive one for this process. So the handler is delayed too, because it would leave a process half started.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else the first process starts it, and unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    came: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        heard = [one for one in SIGNALS if callable(signal.getsignal(one))]
        handlers = {one: signal.signal(one, lambda number, _: came.append(number)) for one in heard}
    try:
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in came:
            signal.raise_signal(number)
