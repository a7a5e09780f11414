"""The TCP ports on which processes of this machine listen. Linux tells."""

import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Listening(NamedTuple):
    address: str
    """As Linux writes it: 0100007F is 127.0.0.1."""
    port: int
    inode: str


def listening() -> set[Listening]:
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    places = [(*row[1].split(":"), f"socket:[{row[9]}]") for row in rows if row[3] == "0A"]
    return {Listening(address, int(port, 16), inode) for address, port, inode in places}


def free_port() -> int:
    """A port that nobody has, for a program that needs its number in advance.

    It is not one of those that the system gives out: a connection of another test may get such a port at any moment,
    and one that tries again and again to reach it may at last be connected to itself.
    """
    while True:
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", random.randrange(10_000, 30_000)))
            return int(listening.getsockname()[1])


def ports_of_this_process() -> list[int]:
    mine = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            mine.add(str(path.readlink()))
    return sorted(place.port for place in listening() if place.inode in mine)
