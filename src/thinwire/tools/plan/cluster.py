"""Describe a cluster in numbers, given or measured: its ranks, nodes and links."""

import math
from dataclasses import dataclass, replace

PEER_SHARE, SPREAD_SHARE = 0.89, 0.75
"""Share of a link's rate that carries payload: if each rank sends to one peer, as in a ring, and if each rank sends to
several peers, so that several flows share every link. The headers of TCP and Ethernet take 6 %. `thinwire plan --check`
shows how accurate these values are."""


@dataclass(frozen=True)
class Cluster:
    """Identical nodes (`hosts`), each with one full-duplex link to a switch that carries the traffic of all links.

    Times are those of a rank while all other ranks of its node work too.
    """

    world: int
    rate: float
    """Bits per second of a node's link, in each direction."""
    latency: float
    """Seconds from sending a message to its arrival."""
    ranks_per_host: int = 1
    inside: float = 100e9
    """Bits per second between two ranks of a node."""
    peer_share: float = PEER_SHARE
    spread_share: float = SPREAD_SHARE
    codec_slows: float = 1.0
    """Seconds that the backward pass loses per second of compression at the same time: 1 if both share a CPU, 0 if each
    has its own. It is 0 on accelerators, where the codec is fast and the CPU only launches it."""
    wire_slows: float = 0.0
    """Seconds that the backward pass loses per second of handling sent bytes; 0 if the model is on an accelerator."""
    trees: bool = False
    """Whether NCCL may use trees in place of a ring: as many bytes, but fewer messages that wait for each other."""

    def __post_init__(self) -> None:
        assert self.world >= 2
        assert self.world % self.ranks_per_host == 0

    @property
    def hosts(self) -> int:
        """Return the number of nodes."""
        return self.world // self.ranks_per_host

    @property
    def ring_rounds(self) -> int:
        """Return the number of messages of a dense all-reduce that wait for each other."""
        ring = 2 * (self.world - 1)
        return min(ring, 2 * math.ceil(math.log2(self.world))) if self.trees else ring

    def ring_seconds(self, nbytes: float) -> float:
        """Return the seconds in which each rank sends `nbytes` to its neighbour in a ring.

        Only one rank of each node has its neighbour on another node, so it does not share the link.
        """
        return 8 * nbytes / (self.peer_share * (self.rate if self.hosts > 1 else self.inside))

    def spread_seconds(self, nbytes: float) -> float:
        """Return the seconds in which each rank sends `nbytes` in total, in equal parts, to all other ranks.

        The ranks of a node share its link. Bytes that stay inside the node travel at the rate `inside`.
        """
        outside = (self.world - self.ranks_per_host) / (self.world - 1)
        through = self.ranks_per_host * outside * nbytes / self.rate
        within = (1 - outside) * nbytes / self.inside
        return 8 * max(through, within) / self._share(self.world)

    def between_seconds(self, nbytes: float) -> float:
        """Return the seconds in which each rank of a node sends `nbytes` to its peers in all other nodes."""
        return 8 * self.ranks_per_host * nbytes / (self._share(self.hosts) * self.rate)

    def inside_seconds(self, nbytes: float) -> float:
        """Return the seconds in which each rank sends `nbytes` to the other ranks of its node."""
        return 8 * nbytes / (self._share(self.ranks_per_host) * self.inside)

    def _share(self, ranks: int) -> float:
        return self.spread_share if ranks > 2 else self.peer_share

    def at(self, *, rate: float | None = None, world: int | None = None) -> "Cluster":
        """Return a copy with another rate or world size."""
        return replace(self, rate=rate or self.rate, world=world or self.world)
