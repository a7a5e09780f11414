"""Whether links have the rate that they were given: a second's worth of bytes from rank 1 to rank 0, by both kinds.

    python benchmarks/link_rates.py [RATE ...]              # such as 100mbit 1gbit

Network namespaces need root and iproute2, and are left out without. Headers count on their links: 95 % is all there is.
"""

import socket
import sys
import threading
import time

from thinwire.tools.bench.link.settings import parse_rate
from thinwire.tools.links import lab
from thinwire.tools.links.lab import Lab, Links
from thinwire.tools.links.network import Network
from thinwire.tools.links.relay import FASTEST, Relay

LIMIT_SECONDS = 60.0


def main(names: list[str]) -> None:
    kinds: dict[str, type[Lab] | type[Relay]] = {} if lab.why_not() else {"namespaces": Lab}
    kinds["relay"] = Relay
    for name in names or ["10mbit", "100mbit", "1gbit", "10gbit"]:
        rate = parse_rate(name)
        for kind, made in kinds.items():
            if made is Relay and rate > FASTEST:
                continue
            with made(2, rate) as network:
                seconds = transfer(network, int(rate / 8))
            print(f"{name:>8}  {kind:<10}  {rate / seconds / 1e6:10,.1f} Mbit/s  {1 / seconds:6.1%}", flush=True)


def transfer(network: Network, nbytes: int) -> float:
    """Seconds until all of it was read."""
    links, ports, listening = network.links, list[int](), threading.Event()

    def receive() -> None:
        if isinstance(links, Links):
            links.enter(0)
        with socket.create_server((links.address(0), 0)) as server:
            server.settimeout(LIMIT_SECONDS)
            ports.append(server.getsockname()[1])
            listening.set()
            line, _ = server.accept()
            with line:
                line.settimeout(LIMIT_SECONDS)
                while line.recv(1 << 20):
                    pass

    def send() -> None:
        if isinstance(links, Links):
            links.enter(1)
        assert listening.wait(LIMIT_SECONDS)
        with socket.create_connection(links.reach(1, 0, ports[0]), timeout=LIMIT_SECONDS) as line:
            line.sendall(bytes(nbytes))
            line.shutdown(socket.SHUT_WR)
            line.recv(1)

    started = time.perf_counter()
    threads = [threading.Thread(target=target, daemon=True) for target in (receive, send)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_SECONDS)
    return time.perf_counter() - started


if __name__ == "__main__":
    main(sys.argv[1:])
