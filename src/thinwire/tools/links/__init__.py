"""Links of a given rate between ranks of this machine, by a relay, which needs no rights (`relay`).

They may have a round-trip time, too: what arrives is then delivered half of it later, in each direction.
"""

from typing import Protocol

LARGEST_WORLD = 64
"""Largest number of ranks on one machine."""


class Links(Protocol):
    """What the process of a rank knows of the others."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""

    def address(self, rank: int) -> str:
        """Return the IP address at which a rank listens."""

    def reach(self, source: int, rank: int, port: int) -> tuple[str, int]:
        """Return the address and port to which `source` connects to reach this port of a rank."""
