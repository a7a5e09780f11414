"""Bytes from rank 1 to rank 0 of a network, and back, without torch."""

import socket
import threading
import time
from collections.abc import Callable

from benchmarks.namespaces import Links as LabLinks
from benchmarks.namespaces import Network

LIMIT = 20.0
Build = Callable[[int, float | None], Network]
"""Makes a network of so many ranks at a rate."""


def connect(network: Network, answer: Callable[[socket.socket], None], ask: Callable[..., None]) -> None:
    """Call `answer` with the line at rank 0, and `ask` at rank 1 with what opens it."""
    links, ports, listening = network.links, list[int](), threading.Event()

    def receive() -> None:
        with socket.create_server((links.address(0), 0)) as server:
            server.settimeout(LIMIT)
            ports.append(server.getsockname()[1])
            listening.set()
            line, _ = server.accept()
            with line:
                line.settimeout(LIMIT)
                answer(line)

    def send() -> None:
        assert listening.wait(LIMIT)
        ask(lambda: socket.create_connection(links.reach(1, 0, ports[0]), timeout=LIMIT))

    def in_place(rank: int, job: Callable[[], None]) -> None:
        if isinstance(links, LabLinks):
            links.enter(rank)  # this thread alone
        job()

    threads = [threading.Thread(target=in_place, args=given) for given in ((0, receive), (1, send))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * LIMIT)
        assert not thread.is_alive()


def round_trips(network: Network, count: int) -> list[float]:
    """Return the seconds of each round trip of one byte, after a first one that opens the connection."""
    seconds = []

    def answer(line: socket.socket) -> None:
        while data := line.recv(1):
            line.sendall(data)

    def ask(open_line: Callable[[], socket.socket]) -> None:
        with open_line() as line:
            for _ in range(count + 1):
                started = time.monotonic()
                line.sendall(b".")
                assert line.recv(1) == b"."
                seconds.append(time.monotonic() - started)

    connect(network, answer, ask)
    assert len(seconds) == count + 1
    return seconds[1:]


class Transfer:
    """Sends so many bytes, and waits until the other end has read all of them and closed.

    received, counted   bytes, by the receiver and by the network.
    seconds             from the connection to the close.
    error               of the sender, if there was one.
    """

    def __init__(self, network: Network, nbytes: int) -> None:
        self.received, self.counted, self.seconds, self.error, self._nbytes = 0, 0, 0.0, "", nbytes
        before = network.sent_bytes()[1]
        connect(network, self._receive, self._send)
        self.counted = network.sent_bytes()[1] - before

    def _receive(self, line: socket.socket) -> None:
        while data := line.recv(1 << 20):
            self.received += len(data)

    def _send(self, open_line: Callable[[], socket.socket]) -> None:
        started = time.perf_counter()
        try:
            with open_line() as line:
                line.sendall(bytes(self._nbytes))
                line.shutdown(socket.SHUT_WR)
                line.recv(1)
        except OSError as error:
            self.error = str(error)
        self.seconds = time.perf_counter() - started
