"""Rows of `pytest.mark.parametrize` that `make test` leaves out and `make test-all` runs: larger or other variants."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One row, of as many values as there are names."""
    return pytest.param(*values, marks=pytest.mark.slow)
