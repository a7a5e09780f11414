"""The warning for a program in which rank 0 alone saves its state, though states differ between ranks."""

import warnings
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from ..collectives.transport.channel import Channel


class Saves:
    """Compares the calls of `state_dict()` on rank 0 with those of its neighbour, by the notice board of their group.

    A rank that saves calls `state_dict()` before it sends its part of the next step. So at the end of that step rank 0
    sees whether its neighbour has called it too. A call costs a request, and on rank 0 the next step another one.
    """

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Channel, int] = WeakKeyDictionary()
        """The number of this synchronizer among those of a channel."""
        self._noted: tuple[Channel, str, int] | None = None
        """The last call: the channel, the key of this model on its board, and the number of steps before the call."""
        self._is_checked = self._has_warned = False

    def number(self, channels: Sequence[Channel]) -> None:
        """Number this synchronizer among those of its channels. All ranks call this in the same order."""
        for channel in channels:
            if channel not in self._numbers:
                self._numbers[channel] = next(channel.users)

    def note(self, channels: Sequence[Channel], steps: int) -> None:
        """Note a call of `state_dict()` after `steps` steps."""
        channel = next((each for each in channels if each.size > 1), None)
        if channel is None or self._has_warned or (self._noted is not None and self._noted[2] == steps):
            return
        self._noted = channel, f"saved/{self._numbers[channel]}", steps
        self._is_checked = False
        channel.board.write(f"{self._noted[1]}/{channel.rank}", str(steps))

    def check(self) -> None:
        """Warn on rank 0, at the end of the step after a call, if its neighbour has not called; once."""
        if self._noted is None or self._is_checked or self._noted[0].rank != 0:
            return
        (channel, key, steps), self._is_checked = self._noted, True
        theirs = channel.board.read(f"{key}/1")
        if channel.board.lost is None and (theirs is None or int(theirs) < steps):  # it may have called once more since
            self._has_warned = True
            warnings.warn(
                f"rank {channel.ranks[0]} called state_dict(), and rank {channel.ranks[1]} did not. Residuals and "
                "momentum differ between ranks: what one rank saves alone cannot be loaded by the others. Call "
                "consolidate_state_dict() on all ranks before, or save the state_dict() of every rank",
                stacklevel=4,
            )
