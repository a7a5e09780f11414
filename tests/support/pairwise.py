"""A small choice in place of a full product: every pair of values meets in some row."""

from collections.abc import Iterable
from itertools import combinations
from typing import Any


def pairwise(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each column; each pair of values of two columns is in a row. The same rows on every run.

    >>> pairwise("ab", [1, 2], [True, False])
    [('a', 1, True), ('a', 2, False), ('b', 1, False), ('b', 2, True)]
    """
    values = [list(column) for column in columns]
    sizes = [range(len(column)) for column in values]
    # A pair is (column, index in it, a later column, index in that). A dict keeps their order.
    missing = dict.fromkeys(
        (i, a, j, b) for i, j in combinations(range(len(values)), 2) for a in sizes[i] for b in sizes[j]
    )
    rows = []
    while missing:
        i, a, j, b = next(iter(missing))
        row = {i: a, j: b}
        for k in (k for k in range(len(values)) if k not in row):
            row[k] = max(sizes[k], key=lambda c: sum(pair in missing for pair in _pairs({**row, k: c}, k)))
        for k in row:
            for pair in _pairs(row, k):
                missing.pop(pair, None)
        rows.append(tuple(values[k][row[k]] for k in range(len(values))))
    return rows


def _pairs(row: dict[int, int], k: int) -> list[tuple[int, int, int, int]]:
    """The pairs of a row that column k takes part in."""
    return [(i, a, k, row[k]) if i < k else (k, row[k], i, a) for i, a in row.items() if i != k]
