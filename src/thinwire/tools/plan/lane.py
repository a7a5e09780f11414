"""Schedule a resource that does one thing at a time, such as a CPU or a wire.

Each request gets the first free interval that is long enough.
"""

from bisect import bisect_left, bisect_right, insort


class Lane:
    """Busy intervals of a resource. Adjacent intervals are merged.

    >>> lane = Lane()
    >>> lane.take(0.0, 2.0), lane.take(5.0, 2.0), lane.take(1.0, 3.0), lane.take(1.0, 3.0)
    (2.0, 7.0, 5.0, 10.0)
    """

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    @property
    def end(self) -> float:
        """Return the end of the last busy interval, or 0 if there is none."""
        return self._taken[-1][1] if self._taken else 0.0

    def take(self, at: float, seconds: float) -> float:
        """Reserve the first free interval of this length that starts at `at` or later, and return its end."""
        if seconds <= 0:
            return at
        index = bisect_right(self._taken, (at, float("inf")))
        start = max(at, self._taken[index - 1][1]) if index else at
        while index < len(self._taken) and self._taken[index][0] - start < seconds:
            start = self._taken[index][1]
            index += 1
        self._add(start, start + seconds)
        return start + seconds

    def busy(self, start: float, stop: float) -> float:
        """Return the busy seconds between `start` and `stop`."""
        index = max(0, bisect_left(self._taken, (start, 0.0)) - 1)
        total = 0.0
        for begin, end in self._taken[index:]:
            if begin >= stop:
                break
            total += max(0.0, min(end, stop) - max(begin, start))
        return total

    def _add(self, start: float, stop: float) -> None:
        index = bisect_left(self._taken, (start, 0.0))
        if index < len(self._taken) and self._taken[index][0] == stop:
            stop = self._taken.pop(index)[1]
        if index and self._taken[index - 1][1] == start:
            start = self._taken.pop(index - 1)[0]
        insort(self._taken, (start, stop))
