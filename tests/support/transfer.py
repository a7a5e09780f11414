"""Bytes from rank 1 to rank 0 of a network, without torch."""

import socket
import threading
import time
from collections.abc import Callable

from benchmarks.namespaces import Lab

LIMIT = 20.0


class Transfer:
    """Sends so many bytes, and waits until the other end has read all of them and closed.

    received, counted   bytes, by the receiver and by the network.
    seconds             from the connection to the close.
    error               of the sender, if there was one.
    """

    def __init__(self, network: Lab, nbytes: int) -> None:
        self.received, self.counted, self.seconds, self.error = 0, 0, 0.0, ""
        self._links, self._nbytes = network.links, nbytes
        self._port: list[int] = []
        self._listening = threading.Event()
        before = network.sent_bytes()[1]
        threads = [threading.Thread(target=self._in_place, args=job) for job in ((0, self._receive), (1, self._send))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * LIMIT)
            assert not thread.is_alive()
        self.counted = network.sent_bytes()[1] - before

    def _in_place(self, rank: int, job: Callable[[], None]) -> None:
        self._links.enter(rank)  # this thread alone
        job()

    def _receive(self) -> None:
        with socket.create_server((self._links.address(0), 0)) as server:
            server.settimeout(LIMIT)
            self._port.append(server.getsockname()[1])
            self._listening.set()
            line, _ = server.accept()
            with line:
                line.settimeout(LIMIT)
                while data := line.recv(1 << 20):
                    self.received += len(data)

    def _send(self) -> None:
        assert self._listening.wait(LIMIT)
        started = time.perf_counter()
        try:
            with socket.create_connection(self._links.reach(1, 0, self._port[0]), timeout=LIMIT) as line:
                line.sendall(bytes(self._nbytes))
                line.shutdown(socket.SHUT_WR)
                line.recv(1)
        except OSError as error:
            self.error = str(error)
        self.seconds = time.perf_counter() - started
