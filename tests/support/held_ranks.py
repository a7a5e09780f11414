"""Ranks that are held for a minute, for their parent to be killed."""

import os
import threading

from thinwire.testing import RankPool
from thinwire.testing.pool import Workers


class Waiting:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank

    def wait(self, first: bool) -> int:
        threading.Event().wait(0 if first else 60)
        return os.getpid()


def get_id(rank: int, world_size: int) -> int:
    return os.getpid()


def main() -> None:
    with RankPool() as pool, Workers(2) as workers:
        workers.form(2, Waiting)
        print(*workers.ask("wait", True), *pool.run(get_id, 2), flush=True)
        workers.ask("wait", False)
