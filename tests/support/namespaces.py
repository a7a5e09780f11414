"""Network namespaces: what is there of a process's, and fixtures.

Where namespaces cannot be made, tests with the fixtures are skipped; in CI they fail.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import namespaces

FOLDER = Path("/run/netns")


def ours(process: int | None = None) -> set[str]:
    """Names of the namespaces that a process, by default this one, has made."""
    return {path.name for path in FOLDER.glob(f"thinwire-{process or os.getpid()}-*")}


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


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
