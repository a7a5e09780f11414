"""Strangers that connect to the ports of ranks, and send bytes that nobody understands."""

import socket
import struct
import threading
from contextlib import suppress
from random import Random


def garbage(draw: Random) -> bytes:
    """Return noise, the greeting of another protocol, a length without end, a query of the store, or nothing."""
    noise, number = draw.randbytes(draw.randrange(1, 3000)), struct.pack("<Q", draw.choice([1, 1 << 40, 1 << 62]))
    others = (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01" + noise, b"\xff" * len(noise), b"")
    return draw.choice((noise, number + noise, bytes([draw.randrange(20)]) + number, *others))


def bother(draw: Random, ports: list[int], ended: threading.Event, made: list[int]) -> None:
    """Connect again and again, at most 500 times; some connections stay open, some are closed, some are reset."""
    kept = []
    while not ended.wait(0.002) and len(made) < 500:
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", draw.choice(ports)), timeout=5)
            made.append(connection.fileno())
            connection.sendall(garbage(draw))
            fate = draw.choice(("open", "closed", "reset"))
            if fate == "open":
                kept.append(connection)
                continue
            if fate == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    for connection in kept:
        connection.close()
