"""Programs with ranks that something happens to: signals while the ranks start, or the death of their parent."""

import os
import signal
import threading
from multiprocessing.process import BaseProcess
from types import FrameType

from thinwire.testing import RankPool
from thinwire.testing.pool import Workers


class Stop(BaseException):
    """Raised by the signal."""


def stop(number: int, frame: FrameType | None) -> None:
    raise Stop


def start_while_signals_come() -> None:
    """A thread without blocked signals may take them."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.signal(signal.SIGTERM, stop)
    started: list[BaseProcess] = []
    start = BaseProcess.start

    def start_while_a_signal_comes(process: BaseProcess) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        start(process)
        started.append(process)

    BaseProcess.start = start_while_a_signal_comes  # type: ignore[method-assign]
    try:
        with Workers(2):
            pass
    except Stop:
        print("stopped after", len(started))


class Waiting:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank

    def wait(self, first: bool) -> int:
        threading.Event().wait(0 if first else 60)
        return os.getpid()


def get_id(rank: int, world_size: int) -> int:
    return os.getpid()


def hold_ranks() -> None:
    """Hold four for a minute."""
    with RankPool() as pool, Workers(2) as workers:
        workers.form(2, Waiting)
        print(*workers.ask("wait", True), *pool.run(get_id, 2), flush=True)
        workers.ask("wait", False)
