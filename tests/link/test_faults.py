"""A connection reset, or a link cut, in the middle of a step: an error on every rank within the time-out."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from link_ranks import TestedRank

from thinwire.tools.bench.link.network import network
from thinwire.tools.bench.link.settings import Model
from thinwire.tools.workers import Workers

WORLD, TIMEOUT, GRACE = 3, 4.0, 4.0
OURS = "attach quantize:bits=8"
CASES = [
    pytest.param("relay", "drop", "dense", 1, id="relay drop dense", marks=pytest.mark.slow),
    pytest.param("relay", "drop", OURS, 0, id="relay drop ours"),
    pytest.param("namespaces", "cut", "dense", 1, id="namespaces cut dense"),
    pytest.param("namespaces", "cut", OURS, 1, id="namespaces cut ours"),
]


@pytest.mark.parametrize(("kind", "fault", "way", "rank"), CASES)
def test_all_ranks_raise(kind: str, fault: str, way: str, rank: int, request: pytest.FixtureRequest) -> None:
    if kind == "namespaces":
        request.getfixturevalue("untouched")
    net = network(WORLD, None, relay=kind == "relay")
    with net, Workers(WORLD) as workers, ThreadPoolExecutor(1) as pool:
        workers.make(WORLD, TestedRank, net.links, TIMEOUT)
        workers.ask("join", workers.ask("host")[0])
        if way == OURS:
            workers.ask("load_kernels", OURS.split()[1])
        workers.ask("start", way, Model("gpt", 3e5, 2))
        workers.ask("steps", 2)
        net.shape(5e6 if way == "dense" else 2e6)  # two seconds or so for the next step
        before = sum(net.sent_bytes())
        answers = pool.submit(workers.ask, "attempt", limit=TIMEOUT + 2 * GRACE)
        deadline = time.monotonic() + TIMEOUT
        while sum(net.sent_bytes()) < before + 60_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        getattr(net, fault)(rank)
        for raised, seconds in answers.result(TIMEOUT + 3 * GRACE):
            assert raised
            assert seconds < TIMEOUT + GRACE
