"""Bytes that go from rank 1 to rank 0 of a network and back, without torch."""

import socket
import threading
import time
from collections.abc import Callable

from benchmarks.namespaces import Links as LabLinks
from benchmarks.namespaces import Network
from support.transfer import LIMIT


def round_trips(network: Network, count: int) -> list[float]:
    """Return the seconds of each round trip of one byte, after a first one that opens the connection."""
    links, ports, listening, seconds = network.links, list[int](), threading.Event(), list[float]()

    def answer() -> None:
        with socket.create_server((links.address(0), 0)) as server:
            server.settimeout(LIMIT)
            ports.append(server.getsockname()[1])
            listening.set()
            line, _ = server.accept()
            with line:
                line.settimeout(LIMIT)
                while data := line.recv(1):
                    line.sendall(data)

    def ask() -> None:
        assert listening.wait(LIMIT)
        with socket.create_connection(links.reach(1, 0, ports[0]), timeout=LIMIT) as line:
            for _ in range(count + 1):
                started = time.monotonic()
                line.sendall(b".")
                assert line.recv(1) == b"."
                seconds.append(time.monotonic() - started)

    def in_place(rank: int, job: Callable[[], None]) -> None:
        if isinstance(links, LabLinks):
            links.enter(rank)  # this thread alone
        job()

    threads = [threading.Thread(target=in_place, args=given) for given in ((0, answer), (1, ask))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * LIMIT)
        assert not thread.is_alive()
    assert len(seconds) == count + 1
    return seconds[1:]
