"""The TCP ports on which processes of this machine listen. Linux tells."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Listening(NamedTuple):
    address: str
    """As Linux writes it: 0100007F is 127.0.0.1."""
    port: int
    socket: str


def listening() -> set[Listening]:
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    places = [(*row[1].split(":"), f"socket:[{row[9]}]") for row in rows if row[3] == "0A"]
    return {Listening(address, int(port, 16), socket) for address, port, socket in places}


def ports_of_this_process() -> list[int]:
    mine = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            mine.add(str(path.readlink()))
    return sorted(place.port for place in listening() if place.socket in mine)
