"""Slow links on one machine: a network namespace for each rank, joined by a switch, with each link shaped to a rate.

    with Lab(ranks=2, rate=100e6) as lab:
        lab.links.enter(0)                   # in the process of rank 0, before it opens a socket
        lab.links.address(0)                 # the address of rank 0 for the other ranks

Everything is inside namespaces that are created here, the switch too, so nothing of the machine changes. Their names
contain the id of the process that created them. A second process, which ^C does not reach, waits for its end and then
removes them, so that even SIGKILL leaves nothing behind. A token bucket (`tc ... tbf`) shapes both ends of a link.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from thinwire.tools.links.relay import Relay

NAMESPACES = Path("/run/netns")
"""Where `ip netns` keeps a file for each namespace."""
_LIMIT_SECONDS = 30.0
_NETWORK = "10.83.0"
"""Prefix of the addresses, which exist inside the namespaces only."""
_BURST_SECONDS, _SMALLEST_BURST = 0.002, 16_000
"""Size of a burst: two milliseconds at the rate, but at least a few packets."""
_QUEUE = "50ms"
"""What a link queues at the rate."""
_CLONE_NEWNET = 0x40000000


def why_not() -> str | None:
    """Return why this process cannot build a lab, or None if it can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    return "network namespaces need root, and this is not root" if os.geteuid() else None


@dataclass(frozen=True)
class Links:
    """The part of a lab that is sent to the process of each rank."""

    prefix: str
    ranks: int

    @property
    def namespaces(self) -> list[str]:
        """Return the name of the switch's namespace, then those of the ranks."""
        return [f"{self.prefix}switch", *(f"{self.prefix}{rank}" for rank in range(self.ranks))]

    def address(self, rank: int) -> str:
        return f"{_NETWORK}.{rank + 1}"

    def enter(self, rank: int) -> None:
        """Move the calling thread, and all threads that it starts from now on, into the namespace of a rank."""
        with open(NAMESPACES / self.namespaces[rank + 1], encoding="utf-8") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {file.name}")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def reach(self, source: int, rank: int, port: int) -> tuple[str, int]:
        """Return where `source` finds the port of a rank: there, because it connects directly."""
        return self.address(rank), port


class Lab:
    """Network namespaces with links of so many bits per second. None means no limit."""

    def __init__(self, ranks: int, rate: float | None) -> None:
        reason = why_not()
        if reason is not None:
            raise ValueError(reason)
        self._rate = rate
        self.links = Links(f"thinwire-{os.getpid()}-", ranks)
        self._guard: subprocess.Popen[bytes] | None = None

    def cut(self, rank: int) -> None:
        _run("ip", "-n", self.links.namespaces[0], "link", "set", f"port{rank}", "down")

    def shape(self, rate: float | None) -> None:
        switch, *others = self.links.namespaces
        for rank, name in enumerate(others):
            for where, device in ((name, "eth0"), (switch, f"port{rank}")):
                if self._rate is not None:
                    _run("tc", "-n", where, "qdisc", "del", "dev", device, "root")
                if rate is not None:
                    burst = max(_SMALLEST_BURST, int(rate / 8 * _BURST_SECONDS))
                    shaped = ("tbf", "rate", f"{int(rate)}bit", "burst", str(burst), "latency", _QUEUE)
                    _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", *shaped)
        self._rate = rate

    def sent_bytes(self) -> list[int]:
        """Return the bytes sent so far by the interface of each rank, headers included."""
        show = ("link", "show", "dev", "eth0")
        found = [
            json.loads(_run("ip", "-json", "-statistics", "-n", name, *show)) for name in self.links.namespaces[1:]
        ]
        return [int((one.get("stats64") or one["stats"])["tx"]["bytes"]) for (one,) in found]

    def __enter__(self) -> Self:
        sweep()
        # It removes the namespaces when its input ends, at the latest with the end of this process.
        script = 'read -r _; for name in "$@"; do ip netns del "$name" 2>/dev/null; done; exit 0'
        command = ["sh", "-c", script, "thinwire-guard", *self.links.namespaces]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # ^C does not reach it
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _build(self) -> None:
        switch, *others = self.links.namespaces
        for name in self.links.namespaces:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for rank, name in enumerate(others):
            port = f"port{rank}"
            _run("ip", "link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.links.address(rank)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
        rate, self._rate = self._rate, None
        self.shape(rate)

    def _remove(self) -> None:
        """Close the input of the guard and wait for it."""
        assert self._guard is not None
        self._guard.communicate(timeout=_LIMIT_SECONDS)


def sweep() -> None:
    """Remove the namespaces of labs whose process no longer exists."""
    for path in NAMESPACES.glob("thinwire-*"):
        process = path.name.split("-")[1]
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, timeout=_LIMIT_SECONDS, check=False)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


Network = Lab | Relay
"""All links, in the process that starts the ranks."""


def network(ranks: int, rate: float | None, round_trip: float = 0.0, *, relay: bool) -> Network:
    """Return a relay or a lab, which is not yet entered. Only a relay has a round-trip time."""
    return Relay(ranks, rate, round_trip) if relay or round_trip else Lab(ranks, rate)
