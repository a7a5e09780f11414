"""The thread that looks around for operations which take long."""

import gc
import threading
import time
import weakref

from thinwire.collectives.transport.watch import watch


class Slow:
    def __init__(self) -> None:
        self.looked = threading.Event()

    def check_others(self) -> None:
        self.looked.set()

    def give_up(self, error: BaseException) -> object:
        return None


def test_it_keeps_nothing_of_an_operation_that_has_ended() -> None:
    operation = Slow()
    watch.begin(operation)
    assert operation.looked.wait(30)
    watch.end(operation)
    left = weakref.ref(operation)
    del operation
    deadline = time.monotonic() + 10
    while left() is not None:
        assert time.monotonic() < deadline, "the thread keeps it"
        gc.collect()
        time.sleep(0.02)
