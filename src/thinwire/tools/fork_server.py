"""The server of local ranks: a process that loads torch once, and of which each rank is a copy.

`start` comes before this process imports torch, so that both load it at the same time.
"""

import multiprocessing
import multiprocessing.forkserver
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PRELOAD = ["thinwire.tools.workers", "thinwire.optim", "thinwire.kernels.cpu.ready", "torch._dynamo"]
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


def start() -> None:
    """Start the server now, if this system has one. Otherwise the first rank starts it."""
    if context().get_start_method() == "forkserver":
        with signals_wait():
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
