"""Whether links have the rate and the round-trip time that they were given: bytes between ranks 1 and 0, by both kinds.

    python benchmarks/link_rates.py [RATE[,TIME] ...]              # such as 100mbit 1gbit,100ms

Ten single bytes go to and fro, then what the link carries in a second and 20 round-trip times goes one way. Network
namespaces need root and iproute2, and are left out without. Headers count on their links: 95 % is all there is, and
less with a long round-trip time, because TCP needs some of them to find out the rate.
"""

import socket
import sys
import threading
import time

from thinwire.tools.links import lab
from thinwire.tools.links.lab import Lab, Links
from thinwire.tools.links.network import Network
from thinwire.tools.links.relay import FASTEST, Relay
from thinwire.tools.units import parse_link

LIMIT_SECONDS = 60.0
PINGS = 10


def main(names: list[str]) -> None:
    kinds: dict[str, type[Lab] | type[Relay]] = {} if lab.why_not() else {"namespaces": Lab}
    kinds["relay"] = Relay
    for name in names or ["10mbit", "100mbit", "1gbit", "10gbit", "100mbit,100ms", "1gbit,100ms"]:
        rate, round_trip = parse_link(name)
        nbytes = int(rate / 8 * (1 + 20 * round_trip))
        for kind, made in kinds.items():
            if made is Relay and rate > FASTEST:
                continue
            with made(2, rate, round_trip) as network:
                pings, seconds = transfer(network, nbytes)
            print(
                f"{name:>13}  {kind:<10}  {8 * nbytes / seconds / 1e6:8,.1f} Mbit/s  {8 * nbytes / rate / seconds:6.1%}"
                f"  round trip {1e3 * min(pings):7.2f} to {1e3 * max(pings):7.2f} ms",
                flush=True,
            )


def transfer(network: Network, nbytes: int) -> tuple[list[float], float]:
    """Return the seconds of each round trip of a byte, and those until all bytes were read."""
    links, ports, listening = network.links, list[int](), threading.Event()
    pings, taken = list[float](), list[float]()

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
                for _ in range(PINGS):
                    line.sendall(line.recv(1))
                while line.recv(1 << 20):
                    pass

    def send() -> None:
        if isinstance(links, Links):
            links.enter(1)
        assert listening.wait(LIMIT_SECONDS)
        with socket.create_connection(links.reach(1, 0, ports[0]), timeout=LIMIT_SECONDS) as line:
            for _ in range(PINGS):
                started = time.perf_counter()
                line.sendall(b".")
                line.recv(1)
                pings.append(time.perf_counter() - started)
            started = time.perf_counter()
            line.sendall(bytes(nbytes))
            line.shutdown(socket.SHUT_WR)
            line.recv(1)
            taken.append(time.perf_counter() - started)

    threads = [threading.Thread(target=target, daemon=True) for target in (receive, send)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_SECONDS)
    return pings, taken[0]


if __name__ == "__main__":
    main(sys.argv[1:])
