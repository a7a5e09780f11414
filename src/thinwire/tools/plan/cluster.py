"""The ranks of a case and their links: how long the wire is busy with a transfer. This module needs no torch."""

from dataclasses import dataclass
from math import hypot
from typing import Literal, NamedTuple

PEER_SHARE, SPREAD_SHARE = 0.89, 0.75
"""Share of a link's rate that carries payload: if each rank sends to one peer, as in a ring, and if each rank sends to
several peers, so that several flows share every link. The headers of TCP and Ethernet take 6 %. `thinwire plan --check`
shows how accurate these values are."""


class Transfer(NamedTuple):
    """Phase in which ranks exchange bytes."""

    route: Literal["ring", "spread"]
    """Destination: a neighbour, or all other ranks."""
    nbytes: float
    """Bytes that each rank sends; it receives as many."""
    rounds: int
    """Number of messages that wait for each other."""
    handling: float
    """CPU seconds of each rank."""


@dataclass(frozen=True)
class Cluster:
    """Identical ranks, each with one link to a switch that carries the traffic of all links."""

    world: int
    rate: float
    """Bits per second of a link, in each direction."""
    latency: float
    """Seconds from sending a message to its arrival."""
    peer_share: float = PEER_SHARE
    spread_share: float = SPREAD_SHARE
    codec_slows: float = 1.0
    """Seconds that the backward pass loses per second of compression at the same time: 1 if both share a CPU, 0 if each
    has its own. It is 0 on accelerators, where the codec is fast and the CPU only launches it."""
    wire_slows: float = 0.0
    """Seconds that the backward pass loses per second of handling sent bytes; 0 if the model is on an accelerator."""
    nccl: bool = False
    """Whether NCCL reduces dense gradients. It may use trees in place of a ring: fewer messages wait for each other."""
    memory: float | None = None
    """Bytes of memory of a rank; None if it is not known."""
    is_shared: bool = False
    """Whether all links are one half-duplex channel, as with Wi-Fi: it carries the bytes of all ranks one after the
    other, and each twice, to the access point and from there. Without it links are full duplex."""

    def wire_seconds(self, transfer: Transfer) -> tuple[float, float]:
        """Return the seconds in which the wire is busy with a transfer, and those from then until all has arrived.

        Bytes are handled while others travel, but a pipeline of few segments does not fully overlap the two. The time
        is modelled as sqrt(link² + handling²): 1.4 times as long as either if both are equal. If `wire_slows` is 0,
        each exchange has a CPU of its own for the handling, and the wire is free for others in the meantime.
        """
        share = self.spread_share if transfer.route == "spread" and self.world > 2 else self.peer_share
        link = 8 * transfer.nbytes / (share * self.rate) * (2 * self.world if self.is_shared else 1)
        whole, latency = hypot(link, transfer.handling), transfer.rounds * self.latency
        return (whole, latency) if self.wire_slows else (link, whole - link + latency)
