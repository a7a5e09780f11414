"""Links of a given rate between ranks of this machine, by a relay, which needs no rights (`relay`).

They may have a round-trip time, too: what arrives is then delivered half of it later, in each direction.
"""

from typing import Protocol

LARGEST_WORLD = 64
"""Largest number of ranks on one machine."""


class Links(Protocol):
    """The part of a network that is sent to the process of each rank."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""

    def enter(self, rank: int) -> None:
        """Make the calling process rank `rank`, before it opens a socket. What it sends then goes through its link."""

    def address(self, rank: int) -> str:
        """Return the IP address at which a rank listens."""

    def reach(self, source: int, rank: int, port: int) -> tuple[str, int]:
        """Return the address and port to which `source` connects to reach this port of a rank."""
