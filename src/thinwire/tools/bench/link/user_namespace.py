"""Gives a process the rights of root in a user namespace, if the kernel allows it, so that it can create namespaces.

These rights apply to everything that the process creates in the namespace and to nothing outside of it. The namespace
ends with its last process.
"""

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000


def become_root() -> None:
    """Move this process into a new user namespace. Raises OSError if the kernel refuses.

    The process must have one thread only. It also gets its own /run, because `ip netns` keeps its names in /run/netns,
    where only root may write.
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
