"""The pool of rank processes that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
