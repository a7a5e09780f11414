"""The interface of links between ranks that have a rate and count their bytes. `lab` and `relay` implement it."""

import os
from typing import Protocol, Self

from . import lab
from .lab import Lab
from .relay import Relay
from .user_namespace import become_root


class Links(Protocol):
    """The part of a network that is sent to the process of each rank."""

    def enter(self, rank: int) -> None:
        """Make the calling process rank `rank`, before it opens a socket. What it sends then goes through its link."""

    def address(self, rank: int) -> str:
        """Return the IP address at which a rank listens."""

    def reach(self, source: int, rank: int, port: int) -> tuple[str, int]:
        """Return the address and port to which `source` connects to reach this port of a rank."""


class Network(Protocol):
    """All links, in the process that starts the ranks."""

    @property
    def links(self) -> Links:
        """The part that is sent to the process of each rank."""

    def shape(self, rate: float | None) -> None:
        """Set the rate of all links, in bits per second in each direction. None means no limit."""

    def cut(self, rank: int) -> None:
        """Disconnect a rank: nothing passes its link, and no rank gets an error from it."""

    def sent_bytes(self) -> list[int]:
        """Return the bytes sent so far by each rank."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def network(ranks: int, rate: float | None, *, relay: bool) -> Network:
    """Return a relay or a lab, which is not yet entered."""
    return Relay(ranks, rate) if relay else Lab(ranks, rate)


def prepare() -> None:
    """Check that namespaces can be created, with or without root.

    Without root, the process moves into a user namespace. Raises ValueError with an alternative if it cannot.
    """
    try:
        reason = lab.what_is_missing()
        if reason is not None:
            raise ValueError(reason)
        if os.geteuid():
            become_root()
        with Lab(1, None):  # root in a container may lack the rights
            pass
    except (ValueError, OSError) as error:
        raise ValueError(
            f"no links by network namespaces: {error}; "
            "--relay needs no rights and no tools: ranks on the loopback interface, through a relay that holds their "
            "bytes back"
        ) from None
