"""Fixtures of all tests. `cases` is the contract table, `oracle` the naive answers, `guard` the tripwires."""

import os
from collections.abc import Iterator

# Before torch is loaded: threads that wait by spinning make the tests several times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from cases import BACKENDS
from thinwire import kernels


@pytest.fixture(autouse=True, scope="session")
def _default_kernels() -> None:
    """A variable in the developer's shell must not change which kernels the tests think they test."""
    os.environ.pop(kernels.ENVIRONMENT_VARIABLE, None)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with each backend's kernels."""
    with kernels.force(request.param):
        yield request.param
