"""A connection reset, or a link cut, in the middle of a step: an error on every rank within the time-out."""

import pytest

from support.link_ranks import GRACE, OURS, disturb

WORLD, TIMEOUT = 3, 4.0
CASES = [
    pytest.param("relay", "drop", "dense", 1, id="relay drop dense", marks=pytest.mark.slow),
    pytest.param("relay", "drop", OURS, 0, id="relay drop ours"),
    pytest.param("namespaces", "cut", "dense", 1, id="namespaces cut dense", marks=pytest.mark.slow),
    pytest.param("namespaces", "cut", OURS, 1, id="namespaces cut ours"),
]


@pytest.mark.parametrize(("kind", "fault", "method", "rank"), CASES)
def test_all_ranks_raise(kind: str, fault: str, method: str, rank: int, request: pytest.FixtureRequest) -> None:
    if kind == "namespaces":
        request.getfixturevalue("untouched")
    for raised, seconds in disturb(
        WORLD, method=method, fault=fault, rank=rank, timeout=TIMEOUT, relay=kind == "relay"
    ):
        assert raised
        assert seconds < TIMEOUT + GRACE
