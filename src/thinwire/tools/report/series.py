"""Reduces curves to the points that a screen can show, without hiding a spike or a gap."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

LIMIT = 2000
"""Approximate number of points of a curve: twice the width of a chart."""
SPLIT_LIMIT = 100
"""Number of points of a stack of areas, which are means."""

Value = float | None
Columns = dict[str, list[Value]]


def thin(values: Sequence[Value], limit: int = LIMIT) -> list[int]:
    """Return the indices of the points to draw.

    They are the first and the last point, and of each stretch the lowest point, the highest point and one gap.

    >>> thin([5.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 0.0, None, 1.0, 1.0, 1.0], limit=4)
    [0, 1, 3, 6, 7, 8, 11]
    """
    if len(values) <= limit:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for stretch in stretches(len(values), limit // 2):
        known = [(value, at) for at in stretch if (value := values[at]) is not None]
        if known:
            kept |= {min(known)[1], max(known, key=lambda pair: pair[0])[1]}
        kept |= set([at for at in stretch if values[at] is None][:1])
    return sorted(kept)


def stretches(length: int, count: int) -> list[range]:
    """Split range(length) into `count` ranges of about the same length, without empty ones.

    >>> stretches(7, 3)
    [range(0, 2), range(2, 4), range(4, 7)]
    """
    edges = [length * n // count for n in range(count + 1)]
    return [range(a, b) for a, b in pairwise(edges) if b > a]


def mean(values: Iterable[Value]) -> Value:
    """Return the mean of the values that are not None, or None if there are none.

    >>> mean([1.0, None, 3.0]), mean([None])
    (2.0, None)
    """
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def curve(places: Sequence[tuple[Value, ...]], values: Sequence[Value], limit: int = LIMIT) -> Columns:
    """Return columns of step, seconds, bytes and value, with a column of means if points were left out.

    A mean is that of the stretch around a point. Smoothing starts from the means, because the lowest and highest points
    alone would give a different curve.
    """
    kept = thin(values, limit)
    columns = _columns([places[at] for at in kept])
    columns["value"] = [short(values[at]) for at in kept]
    if len(kept) < len(values):
        means: list[Value] = []
        for stretch in stretches(len(values), limit // 2):
            means += [short(mean(values[at] for at in stretch))] * len(stretch)
        columns["mean"] = [means[at] if values[at] is not None else None for at in kept]
    return columns


def stack(places: Sequence[tuple[Value, ...]], rows: Sequence[Sequence[float] | None], parts: int) -> Columns:
    """Return columns of step, seconds, bytes and each part.

    Each point is the mean over a stretch, so that areas remain shares of the time.
    """
    at = stretches(len(rows), min(SPLIT_LIMIT, len(rows))) if rows else []
    columns = _columns([places[stretch[-1]] for stretch in at])
    for part in range(parts):
        columns[f"part{part}"] = [
            short(mean(row[part] if (row := rows[n]) is not None else None for n in stretch)) for stretch in at
        ]
    return columns


def short(value: Value) -> Value:
    """Round to six digits, which is enough for a chart and makes the file a third as long; None if not finite.

    >>> short(0.123456789), short(123456789.0), short(3.0), short(float("inf"))
    (0.123457, 123457000.0, 3, None)
    """
    if value is None or not abs(value) < 1e300:  # as large integers cannot become floats
        return None
    if value == int(value) and abs(value) < 2**53:
        value = int(value)
    return value if isinstance(value, int) and abs(value) < 10**7 else float(f"{value:.6g}")


def _columns(places: Sequence[tuple[Value, ...]]) -> Columns:
    return {name: [short(place[n]) for place in places] for n, name in enumerate(("step", "seconds", "bytes"))}
