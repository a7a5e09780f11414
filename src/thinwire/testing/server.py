"""The server of ranks: a process that loads torch once, and of which each rank is a copy.

This module does not load torch, so that a program can start the server first, and both load it at the same time.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PRELOAD = [
    "thinwire.testing.pool", "thinwire.optim", "thinwire.integrations", "thinwire.kernels.cpu.ready", "torch._dynamo",
]  # fmt: skip
"""What the server loads. DDP imports torch._dynamo, which takes a second."""


def context() -> Any:
    """Return the multiprocessing context that starts the processes, by forks of the server.

    Nothing is forked from this process, because it may have threads or have used a GPU.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def start(environment: Mapping[str, str] | None = None) -> None:
    """Start the server if it does not run yet; without this, the first rank starts it.

    environment   variables that it has besides those of this process. The first start decides.
    """
    from unittest.mock import patch  # which `thinwire --help` need not load

    context()
    with signals_wait(), patch.dict(os.environ, environment or {}):
        multiprocessing.forkserver.ensure_running()


@contextmanager
def signals_wait() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until all processes are started.

    The processes start with these signals blocked, and unblock them when they are ready. A thread of a library may
    still receive one for this process, so the handler is delayed too: it would leave a process half started.
    """
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
