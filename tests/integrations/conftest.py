"""Fixtures of the tests of frameworks."""

import pytest

from support.frameworks.runs import Trained, trained_plainly
from thinwire.testing import RankPool


@pytest.fixture(scope="session")
def plain(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The training by a plain loop, with which those by frameworks are compared."""
    return trained_plainly(ranks, tmp_path_factory.mktemp("plain") / "run")
