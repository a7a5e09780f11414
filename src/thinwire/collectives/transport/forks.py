"""What happens to connections when the process forks, as for the workers of a DataLoader.

A forked child has none of the threads, and shares the open sockets and gloo's epoll set with its parent. So the child
drops everything that would write to the store, close a connection or run at its exit: each module registers how, with
`in_child`. Objects of C++ are never freed in the child, because their destructors would remove the parent's sockets
from the shared epoll set. The child closes its copies of the sockets: a killed parent would look alive otherwise.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_kept: list[object] = []
_sockets: dict[int, int] = {}  # of gloo's connections: the inode of each file descriptor


def in_child(drop: Callable[[], object]) -> None:
    """Call `drop` in every forked child. What it returns is never freed in the child."""
    os.register_at_fork(after_in_child=lambda: _kept.append(drop()))


@contextmanager
def new_sockets_closed_in_children() -> Iterator[None]:
    """Let forked children close the sockets that the `with` block opens, and those of other threads meanwhile."""
    before = _open_sockets()
    try:
        yield
    finally:
        _sockets.update(dict(_open_sockets().items() - before.items()))


def _open_sockets() -> dict[int, int]:
    """Return the inode of each socket of this process, by file descriptor; on systems without /proc, nothing."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                status = os.stat(f"/proc/self/fd/{name}")
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


def _close_sockets() -> None:
    for number, inode in _sockets.items():
        with suppress(OSError):
            if os.fstat(number).st_ino == inode:  # a number is used again once its socket is closed
                os.close(number)
    _sockets.clear()


in_child(_close_sockets)
