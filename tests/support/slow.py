"""Rows of `pytest.mark.parametrize` that `make test` leaves out and `make test-all` runs: larger or other variants."""

from collections.abc import Collection
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One row, of as many values as there are names."""
    return pytest.param(*values, marks=pytest.mark.slow)


def some_slow(values: Collection[Any], *which: Any) -> list[Any]:
    """All values, of which these are slow.

    >>> [len(value.marks) for value in some_slow({"a": 1, "b": 2}, "b")]
    [0, 1]
    """
    assert {*which} <= {*values}, f"{which} are not all in {values}"
    return [slow(value) if value in which else pytest.param(value) for value in values]
