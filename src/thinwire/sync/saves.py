"""The warning for a program in which rank 0 alone saves its state, though states differ between ranks."""

import warnings
import zlib
from collections.abc import Iterable, Sequence

from ..collectives.transport.channel import Channel


class Saves:
    """Compares the first `state_dict()` of rank 0 with its neighbour, by the notice board of their group.

    A rank that saves calls `state_dict()` before it sends its part of the next step. So at the end of that step rank 0
    sees whether its neighbour has called it too. Only the first call of a rank costs a request.
    """

    def __init__(self) -> None:
        self._noted: tuple[Channel, str] | None = None
        self._is_checked = False

    def note(self, channels: Sequence[Channel], names: Iterable[str]) -> None:
        """Note a call of `state_dict()` after the first step; `names` distinguish the models of a program."""
        channel = next((each for each in channels if each.size > 1), None)
        if self._noted is None and channel is not None:
            self._noted = channel, f"saved/{zlib.crc32(' '.join(names).encode())}"
            channel.board.write(f"{self._noted[1]}/{channel.rank}", "yes")

    def check(self) -> None:
        """Warn on rank 0, at the end of the step after its first call, if its neighbour has not called."""
        if self._noted is None or self._is_checked:
            return
        (channel, key), self._is_checked = self._noted, True
        if channel.rank == 0 and channel.board.read(f"{key}/1") is None and channel.board.lost is None:
            warnings.warn(
                f"rank {channel.ranks[0]} called state_dict(), and rank {channel.ranks[1]} did not. Residuals and "
                "momentum differ between ranks: what one rank saves alone cannot be loaded by the others. Call "
                "consolidate_state_dict() on all ranks before, or save the state_dict() of every rank",
                stacklevel=4,
            )
