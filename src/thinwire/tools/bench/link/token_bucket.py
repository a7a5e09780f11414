"""Limits a rate with a token bucket. The bucket fills at the rate, and each byte that passes takes one token."""

import asyncio
import time

_SECONDS = 0.004
"""Capacity of the bucket, in seconds of the rate. System timers may be late by one or two milliseconds."""
_SMALLEST_PIECE, LARGEST_PIECE = 2_000, 256_000


class TokenBucket:
    """A token bucket. Its level may become negative, and the caller then waits until it would be zero again.

    rate   bytes per second. None means no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate, self._at = rate, time.monotonic()
        self._full = 0.0 if rate is None else max(rate * _SECONDS, 2.0 * _SMALLEST_PIECE)
        self._level = self._full

    @property
    def piece(self) -> int:
        """Largest number of bytes to take at once, so that all users of the bucket get their turn."""
        if self._rate is None:
            return LARGEST_PIECE
        return int(min(LARGEST_PIECE, max(_SMALLEST_PIECE, self._rate * _SECONDS / 2)))

    async def take(self, nbytes: int) -> None:
        """Take `nbytes` tokens and return when so many bytes may pass, in the order of the calls."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._level = min(self._full, self._level + (now - self._at) * self._rate) - nbytes
        self._at = now
        if self._level < 0:
            await asyncio.sleep(-self._level / self._rate)
