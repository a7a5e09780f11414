"""What stands between ranks: links of a given rate that count their bytes. `lab` and `relay` make them."""

import os
from typing import Protocol, Self

from . import lab
from .lab import Lab
from .relay import Relay
from .user_namespace import become_root


class Links(Protocol):
    """What a rank needs to know; goes to its process."""

    def enter(self, rank: int) -> None:
        """In the process of this rank, before it opens a socket: what it sends to others goes by its link."""

    def address(self, rank: int) -> str:
        """Where a rank listens."""

    def reach(self, source: int, rank: int, port: int) -> tuple[str, int]:
        """What `source` has to connect to, in order to be connected to this port of a rank."""


class Network(Protocol):
    """In the process that starts the ranks."""

    @property
    def links(self) -> Links: ...

    def shape(self, rate: float | None) -> None:
        """Another rate for all links, in bits a second each way; None: as fast as it goes."""

    def cut(self, rank: int) -> None:
        """Pull the plug of a rank: nothing passes any more, and nobody is told."""

    def sent_bytes(self) -> list[int]:
        """So far, by rank."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def network(ranks: int, rate: float | None, *, relay: bool) -> Network:
    return Relay(ranks, rate) if relay else Lab(ranks, rate)


def prepare() -> None:
    """See that namespaces can be made, without root too; ValueError that says what to do instead if they cannot."""
    try:
        reason = lab.what_is_missing()
        if reason is not None:
            raise ValueError(reason)
        if os.geteuid():
            become_root()
        with Lab(1, None):  # root in a container may have no right to
            pass
    except (ValueError, OSError) as error:
        raise ValueError(
            f"no links by network namespaces: {error}; "
            "--relay needs no rights and no tools: ranks on the loopback interface, through a relay that holds their "
            "bytes back"
        ) from None
