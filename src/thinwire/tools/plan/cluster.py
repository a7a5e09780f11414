"""The ranks and what lies between them, in numbers: given, or measured."""

import math
from dataclasses import dataclass, replace

PEER_SHARE, SPREAD_SHARE = 0.89, 0.75
"""What of a link's rate is payload: with one peer, as in a ring, and when each rank sends to several others, whose
flows meet at every link. The headers of TCP and Ethernet take 6 %. `thinwire plan --check` shows how near that is."""


@dataclass(frozen=True)
class Cluster:
    """Hosts that are alike, each with one link of the same rate, both ways at once, to a switch that carries it all.

    Times are those of a rank while all others of its host work too.
    """

    world: int
    rate: float
    """Bits a second of a host's link, each way."""
    latency: float
    """Seconds until a message that is sent has arrived."""
    ranks_per_host: int = 1
    inside: float = 100e9
    """Bits a second between two ranks of a host."""
    peer_share: float = PEER_SHARE
    spread_share: float = SPREAD_SHARE
    codec_slows: float = 1.0
    """What the backward pass loses while compression runs, for each second of that: 1 where they share a processor, 0
    where each has its own. On accelerators 0: their codec is quick, and what starts it runs on the host."""
    wire_slows: float = 0.0
    """The same for the handling of bytes that are sent: 0 where the model is on an accelerator."""
    trees: bool = False
    """NCCL takes trees in place of a ring where that is quicker: as many bytes, but few messages that wait for each
    other."""

    def __post_init__(self) -> None:
        assert self.world >= 2
        assert self.world % self.ranks_per_host == 0

    @property
    def hosts(self) -> int:
        return self.world // self.ranks_per_host

    @property
    def ring_rounds(self) -> int:
        """Messages of a dense all-reduce that wait for each other."""
        ring = 2 * (self.world - 1)
        return min(ring, 2 * math.ceil(math.log2(self.world))) if self.trees else ring

    def ring_seconds(self, nbytes: float) -> float:
        """For a rank's bytes to its neighbour. Of a host's ranks one has its neighbour elsewhere."""
        return 8 * nbytes / (self.peer_share * (self.rate if self.hosts > 1 else self.inside))

    def spread_seconds(self, nbytes: float) -> float:
        """For a rank's bytes to all others alike: those of one host share its link, and what stays inside is quick."""
        outside = (self.world - self.ranks_per_host) / (self.world - 1)
        through = self.ranks_per_host * outside * nbytes / self.rate
        within = (1 - outside) * nbytes / self.inside
        return 8 * max(through, within) / self._share(self.world)

    def between_seconds(self, nbytes: float) -> float:
        """For a rank's bytes to its peers in all other hosts, when all ranks of the host send as many."""
        return 8 * self.ranks_per_host * nbytes / (self._share(self.hosts) * self.rate)

    def inside_seconds(self, nbytes: float) -> float:
        return 8 * nbytes / (self._share(self.ranks_per_host) * self.inside)

    def _share(self, ranks: int) -> float:
        return self.spread_share if ranks > 2 else self.peer_share

    def at(self, *, rate: float | None = None, world: int | None = None) -> "Cluster":
        """The same with another link, or of another size."""
        return replace(self, rate=rate or self.rate, world=world or self.world)
