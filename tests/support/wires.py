"""What the tests of the wire share."""

import threading

SECONDS = 30.0
"""For every wait."""


class Holding:
    """Keeps the wire busy until it is let go, so that all that is submitted meanwhile is there at once."""

    encoded, waits_for_all, has_two_rounds = True, False, True

    def __init__(self) -> None:
        self.begun, self.free = threading.Event(), threading.Event()

    def post(self) -> bool:
        self.begun.set()
        assert self.free.wait(SECONDS)
        return False

    def collect(self) -> bool:
        raise AssertionError("nothing was posted")
