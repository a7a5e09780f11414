"""Ranks that return what a step raised, and that reduce one tensor."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch

import thinwire
from benchmarks.link_steps import LinkRank
from benchmarks.namespaces import network
from support.ports import ports_of_this_process
from thinwire.testing.pool import Workers

GRACE = 4.0
OURS = "attach quantize:bits=8"


class TestedRank(LinkRank):
    __test__ = False

    def load_kernels(self, spec: str) -> None:
        """Before a time-out counts: they may have to be compiled."""
        thinwire.compressor(spec).compress(torch.randn(100_000), torch.zeros(100_000)).decompress()

    def ports(self) -> list[int]:
        return ports_of_this_process()

    def attempt(self) -> tuple[str, float]:
        """What one step raises, and after how many seconds; nothing if it ends well."""
        started = time.monotonic()
        try:
            self.steps(1)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - started
        return "", time.monotonic() - started

    def reduce(self, spec: str, numel: int, times: int) -> None:
        """All-reduce a tensor, again and again."""
        residual = torch.zeros(numel)
        for _ in range(times):
            thinwire.all_reduce_compressed(torch.randn(numel), spec, residual)


def disturb(
    world_size: int, *, method: str, fault: str, rank: int, timeout: float, relay: bool, nbytes: int = 60_000
) -> list[tuple[str, float]]:
    """Cut or drop the link of a rank when `nbytes` of a step are sent: what each rank raises, and after how long."""
    net = network(world_size, None, relay=relay)
    with (
        net,
        Workers(world_size, limit=timeout, links=net.links) as workers,
        ThreadPoolExecutor(1) as pool,
    ):
        workers.form(world_size, TestedRank)
        if method == OURS:
            workers.ask("load_kernels", OURS.split()[1])
        workers.ask("start", method, "gpt", 3e5, 2)
        workers.ask("steps", 2)
        net.shape(5e6 if method == "dense" else 2e6)  # two seconds or so for the next step
        before = sum(net.sent_bytes())
        answers = pool.submit(workers.ask, "attempt", limit=timeout + 2 * GRACE)
        deadline = time.monotonic() + timeout
        while sum(net.sent_bytes()) < before + nbytes and time.monotonic() < deadline:
            time.sleep(0.01)
        getattr(net, fault)(rank)
        return answers.result(timeout + 3 * GRACE)
