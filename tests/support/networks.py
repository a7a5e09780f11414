"""Fixtures for network namespaces. Where namespaces cannot be made, their tests are skipped; in CI they fail."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from benchmarks import namespaces


@pytest.fixture
def lab_can_be_built() -> None:
    reason = namespaces.why_not()
    if reason is not None:
        assert not os.environ.get("CI"), f"in CI the lab must run: {reason}"
        pytest.skip(reason)


@pytest.fixture
def untouched(lab_can_be_built: None) -> Iterator[Callable[[], None]]:
    """Asserts, when called and at the end, that the machine's own network is as it was."""
    before = _machine()

    def check() -> None:
        assert _machine() == before, "something of the machine was touched"

    yield check
    check()


def _machine() -> list[object]:
    """Interfaces with their addresses, routes and queues, without what counts or ticks."""
    seen: list[object] = []
    for command in (["ip", "-json", "address"], ["ip", "-json", "route"], ["tc", "-json", "qdisc", "show"]):
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        for item in json.loads(text or "[]"):
            for address in item.get("addr_info", []):
                address.pop("valid_life_time", None)
                address.pop("preferred_life_time", None)
            seen.append(item)
    return seen
