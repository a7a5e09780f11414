"""Starts processes while signals come, which a thread without blocked signals may take."""

import os
import signal
import threading
from multiprocessing.process import BaseProcess
from types import FrameType

from thinwire.testing.pool import Workers


class Stop(BaseException):
    """Raised by the signal."""


def stop(number: int, frame: FrameType | None) -> None:
    raise Stop


def main() -> None:
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
