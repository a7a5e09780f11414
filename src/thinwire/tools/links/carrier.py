"""What holds the bytes of a relay back: a queue that delays them, and a token bucket that limits their rate."""

import asyncio
import time
from collections import deque

_BUCKET_SECONDS = 0.004
"""Capacity of the bucket, in seconds of the rate. System timers may be late by one or two milliseconds."""
_SMALLEST_PIECE, LARGEST_PIECE = 2_000, 256_000


class Delayed:
    """Pieces of one direction of a connection that are on their way, with the times at which they are due."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._nbytes = 0
        self._changed = asyncio.Event()

    async def put(self, data: bytes, due: float, window: int) -> None:
        """Add a piece, and return when fewer bytes than the window are on their way."""
        self._pieces.append((due, data))
        self._nbytes += len(data)
        self._changed.set()
        while self._nbytes >= window:
            self._changed.clear()
            await self._changed.wait()

    async def get(self) -> bytes:
        """Wait until the first piece is due, and return it."""
        while not self._pieces:
            self._changed.clear()
            await self._changed.wait()
        due, data = self._pieces[0]
        left = due - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)
        self._pieces.popleft()
        self._nbytes -= len(data)
        self._changed.set()
        return data


class TokenBucket:
    """A token bucket. Its level may become negative, and the caller then waits until it would be zero again.

    rate   bytes per second. None means no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate, self._at = rate, time.monotonic()
        self._full = 0.0 if rate is None else max(rate * _BUCKET_SECONDS, 2.0 * _SMALLEST_PIECE)
        self._level = self._full

    @property
    def piece(self) -> int:
        """Return the largest number of bytes to take at once, so that all users of the bucket get their turn."""
        if self._rate is None:
            return LARGEST_PIECE
        return int(min(LARGEST_PIECE, max(_SMALLEST_PIECE, self._rate * _BUCKET_SECONDS / 2)))

    async def take(self, nbytes: int) -> None:
        """Take `nbytes` tokens and return when so many bytes may pass, in the order of the calls."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._level = min(self._full, self._level + (now - self._at) * self._rate) - nbytes
        self._at = now
        if self._level < 0:
            await asyncio.sleep(-self._level / self._rate)
