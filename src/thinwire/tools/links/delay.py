"""A switch that delivers every packet a fixed time after it came: what `tc ... netem delay` does, where it is missing.

    switch = DelayingSwitch("switch", ["port0", "port1"], delay=0.05)
    switch.close()

The ports are interfaces of one network namespace, the ends of cables to the ranks. A thread reads all packets that come
in at a port, by a packet socket, keeps them in a queue with the time at which they are due, and then sends them out at
the port of their receiver. Nothing limits the number of packets on their way, so the delay does not limit the rate. The
rate is limited by the token buckets at the ends of the cables, before and after the delay.

Packets are as the kernel makes them: TCP hands over up to 64 kB at once, with the sizes into which a network card would
cut it and a checksum that is not yet computed. The header in front of each packet (`PACKET_VNET_HDR`) has these, and
goes with it, so that the thread handles 64 kB about as quickly as 1 kB.
"""

import ctypes
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NAMESPACES = Path("/run/netns")
"""Where `ip netns` keeps a file for each namespace."""
_CLONE_NEWNET = 0x40000000
_ALL_PROTOCOLS = 0x0003
_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_BUFFER_BYTES = 32 << 20
"""Memory for packets that wait to be read, or wait in the queue of a token bucket, at each port."""
_HEADER = 10
"""Size of the header in front of each packet."""
_LARGEST = _HEADER + 14 + (1 << 16)
_MOST_AT_ONCE = 64
"""Packets that are read from one port before the others get their turn."""
_LIMIT_SECONDS = 30.0


class _Packet(NamedTuple):
    due: float
    source: int
    """Port at which it came in."""
    data: bytes
    """The header, and an Ethernet frame, which begins with the addresses of its receiver and of its sender."""


class DelayingSwitch:
    """A switch with a delay, which works until it is closed.

    namespace   name of the network namespace that has the ports.
    ports       names of the interfaces.
    delay       seconds from the arrival of a packet to its departure.
    """

    def __init__(self, namespace: str, ports: Sequence[str], delay: float) -> None:
        self._namespace, self._names, self._delay = namespace, ports, delay
        self._ports: list[socket.socket] = []
        self._on_their_way: deque[_Packet] = deque()
        self._port_of: dict[bytes, int] = {}
        """Port behind which a hardware address is, learned from the packets that it sent."""
        self._thread = threading.Thread(target=self._run, name="thinwire-delay", daemon=True)
        self._ready, self._error = threading.Event(), ""
        self._stop, self._stopped = os.pipe()

        self._thread.start()
        if not self._ready.wait(_LIMIT_SECONDS) or self._error:
            self.close()
            raise OSError(f"no delay between network namespaces: {self._error or 'the thread does not start'}")

    def close(self) -> None:
        """Stop. Packets that are on their way are lost."""
        os.write(self._stopped, b".")
        self._thread.join(_LIMIT_SECONDS)
        for end in (self._stop, self._stopped):
            os.close(end)

    def _run(self) -> None:
        try:
            enter_namespace(self._namespace)
            for name in self._names:
                self._ports.append(_open(name))
        except OSError as error:
            self._error = str(error)
        self._ready.set()
        try:
            while not self._error and self._wait():
                pass
        finally:
            for port in self._ports:
                port.close()

    def _wait(self) -> bool:
        """Wait for a packet to come or to be due, and pass on what there is. Return False if it is time to stop."""
        packets = self._on_their_way
        left = max(0.0, packets[0].due - time.monotonic()) if packets else None
        sources: list[socket.socket | int] = [self._stop, *self._ports]
        found, _, _ = select.select(sources, [], [], left)  # waits to the microsecond, unlike epoll
        for number, port in enumerate(self._ports):
            if port in found:
                self._receive(number, port)
        now = time.monotonic()
        while packets and packets[0].due <= now:
            self._deliver(packets.popleft())
        return self._stop not in found

    def _receive(self, number: int, port: socket.socket) -> None:
        due = time.monotonic() + self._delay
        with suppress(BlockingIOError):
            for _ in range(_MOST_AT_ONCE):
                packet = _Packet(due, number, port.recv(_LARGEST))
                self._port_of[packet.data[_HEADER + 6 : _HEADER + 12]] = number
                self._on_their_way.append(packet)

    def _deliver(self, packet: _Packet) -> None:
        to = self._port_of.get(packet.data[_HEADER : _HEADER + 6])
        targets = range(len(self._ports)) if to is None else (to,)
        for target in targets:
            if target != packet.source:
                with suppress(OSError):  # the queue of the port is full, or its cable is cut: the packet is lost
                    self._ports[target].send(packet.data)


def _open(name: str) -> socket.socket:
    """Return a socket that gets what comes in at an interface, and sends out what is written to it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # protocol 0: nothing comes in before it is bound
    try:
        port.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
        port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        for forced, usual in ((_SO_SNDBUFFORCE, socket.SO_SNDBUF), (_SO_RCVBUFFORCE, socket.SO_RCVBUF)):
            try:
                port.setsockopt(socket.SOL_SOCKET, forced, _BUFFER_BYTES)
            except PermissionError:  # in a user namespace of an older kernel
                port.setsockopt(socket.SOL_SOCKET, usual, _BUFFER_BYTES)
        port.setblocking(False)
        port.bind((name, _ALL_PROTOCOLS))
    except BaseException:
        port.close()
        raise
    return port


def enter_namespace(name: str) -> None:
    """Move the calling thread, and all threads that it starts from now on, into the namespace of this name."""
    with open(NAMESPACES / name, encoding="utf-8") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {file.name}")
