"""A rate, kept by a bucket of tokens that fills at it: what passes takes a token for each byte, or waits for them."""

import asyncio
import time

_SECONDS = 0.004
"""What a full bucket lets pass at once, in seconds of the rate: timers of the system may be late by one or two."""
_SMALLEST_PIECE, LARGEST_PIECE = 2_000, 256_000


class TokenBucket:
    """`rate` is in bytes a second, None for no limit. A bucket may be overdrawn: who did it waits until it is not."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._at = rate, time.monotonic()
        self._full = 0.0 if rate is None else max(rate * _SECONDS, 2.0 * _SMALLEST_PIECE)
        self._level = self._full

    @property
    def piece(self) -> int:
        """Not more should be taken at once, so that all who share the bucket have their turn."""
        if self._rate is None:
            return LARGEST_PIECE
        return int(min(LARGEST_PIECE, max(_SMALLEST_PIECE, self._rate * _SECONDS / 2)))

    async def take(self, nbytes: int) -> None:
        """Returns when so many bytes may pass, in the order of the calls."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._level = min(self._full, self._level + (now - self._at) * self._rate) - nbytes
        self._at = now
        if self._level < 0:
            await asyncio.sleep(-self._level / self._rate)
