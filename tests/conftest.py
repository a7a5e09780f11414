"""Fixtures of all tests. Helpers are in `support`: `cases` is the contract table, `oracle` has the naive answers."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

# Before torch is loaded: threads that wait by spinning make the tests several times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from support.cases import BACKENDS
from thinwire import kernels
from thinwire.testing import RankPool, pool, server
from thinwire.tools.train import FASHION_FOLDER
from thinwire.tools.train.image_files import FASHION_PACKAGE

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts what runs in the background like that, and the commands under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # other tests use the other cores; tests of several threads say so


pytest_plugins = ["support.namespaces"]

LONGEST = (
    "project", "train", "contract", "benchmarks", "links", "optim", "integrations", "plan", "browser", "collectives",
    "sync",
)  # fmt: skip
"""Folders whose files take longest. They come first, or one process would end long before the others."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files for `--dist loadfile`, in which a process takes one file after the other."""
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        order = {name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: min(order.get(part, len(order)) for part in item.path.parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without searches for garbage. What was collected stays, and no later search goes through it."""
    gc.disable()
    gc.set_threshold(20_000, 20, 20)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """The server of ranks starts with the environment of `RankPool`, before anything starts it without. A variable in
    the developer's shell must not change which kernels its ranks have."""
    os.environ.pop(kernels.ENVIRONMENT_VARIABLE, None)
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        server.start(pool.ENVIRONMENT)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of processes that all tests with ranks share."""
    pool = RankPool(warnings="error")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def fashion_package() -> Path:
    """The folder of Debian's package for Fashion-MNIST. `make test` installs it where it can, and CI needs it."""
    if not FASHION_FOLDER.is_dir():
        reason = f"no {FASHION_FOLDER} on this machine: apt-get install {FASHION_PACKAGE}"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    return FASHION_FOLDER


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with each backend's kernels."""
    with kernels.force(request.param):
        yield request.param
