"""Makes links between ranks, with a rate, a round-trip time and a count of bytes: a lab where it can be, or a relay."""

import ctypes
import os
from pathlib import Path

from thinwire.tools.units import LinkSpeed, format_seconds

from . import lab
from .lab import Lab
from .relay import Relay

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000


Network = Lab | Relay
"""All links, in the process that starts the ranks."""


def network(ranks: int, rate: float | None, round_trip: float = 0.0, *, relay: bool) -> Network:
    """Return a relay or a lab, which is not yet entered."""
    return (Relay if relay else Lab)(ranks, rate, round_trip)


def description(speed: LinkSpeed, why_relay: str | None) -> str:
    """Return how links of this speed are made, as text for the user.

    why_relay   why the links need a relay; None if they are network namespaces.
    """
    made = "network namespaces, shaped by tc" if why_relay is None else f"a relay, since {why_relay}"
    if not speed.round_trip:
        return made
    what = "packet" if why_relay is None else "byte"
    return f"{made}; thinwire delivers each {what} {format_seconds(speed.round_trip / 2, 3)} after it was sent"


def prepare() -> str | None:
    """Prepare this process to create namespaces, with or without root. Return why it cannot, or None if it can.

    Without root, the process moves into a user namespace. It must have one thread only, so this comes before torch. A
    copy of the process tries it first, because there is no way back.
    """
    reason = lab.what_is_missing() or _refusal()
    if reason is None and os.geteuid():
        become_root()
    return reason


def _refusal() -> str | None:
    """Return why a copy of this process cannot create namespaces, or None if it can."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            if os.geteuid():
                become_root()
            with Lab(1, None):  # root in a container may lack the rights
                pass
        except BaseException as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as answer:
        reason = answer.read()
    os.waitpid(child, 0)
    return reason or None


def become_root() -> None:
    """Move this process into a new user namespace, as its root. Raises OSError if the kernel refuses.

    These rights apply to everything that the process creates in the namespace and to nothing outside of it. The
    namespace ends with its last process. The process must have one thread only. It also gets its own /run, because
    `ip netns` keeps its names in /run/netns, where only root may write.
    """
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        _check("unshare", libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWNET))
        Path("/proc/self/setgroups").write_text("deny")  # the kernel requires this before a group is mapped
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        _check("mount", libc.mount(b"tmpfs", b"/run", b"tmpfs", ctypes.c_ulong(0), None))
    except OSError as error:
        raise OSError(f"the kernel refuses a user namespace ({error.filename}: {error.strerror})") from None


def _check(call: str, result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), call)
