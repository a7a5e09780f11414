"""The lab: namespaces that come and go cleanly, and cut links that say so. Nothing of the machine is touched."""

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable

import pytest

from support.namespaces import FOLDER, ours, wait_until
from support.processes import start_module
from support.transfer import Transfer
from thinwire.tools.links.lab import Lab

pytestmark = pytest.mark.usefixtures("lab_can_be_built", "untouched")


def test_it_comes_and_goes(untouched: Callable[[], None]) -> None:
    with Lab(3, 1e9) as made:
        assert ours() == set(made.links.namespaces)
        untouched()
        assert Transfer(made, 100_000).received == 100_000
    assert not ours()


def test_an_error_inside_leaves_nothing() -> None:
    with pytest.raises(KeyError), Lab(2, 1e9):
        raise KeyError
    assert not ours()


def test_an_error_while_it_is_built_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lab, "shape", lambda self, *speed: 1 / 0)
    with pytest.raises(ZeroDivisionError), Lab(2, 1e9):
        pass
    assert not ours()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(number: signal.Signals) -> None:
    process = start_module("held_lab")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(ours(process.pid)) == 3
    process.send_signal(number)
    process.communicate(timeout=30)
    wait_until(lambda: not ours(process.pid))


def test_what_a_guard_could_not_remove_is_swept_up_and_nothing_else() -> None:
    """As after a loss of power of the guard too: names of a process that is gone."""
    gone = subprocess.Popen(["true"])
    gone.wait(30)
    left, foreign, living = f"thinwire-{gone.pid}-0", f"thinwire-test-{os.getpid()}", f"thinwire-{os.getppid()}-0"
    for name in (left, foreign, living):
        subprocess.run(["ip", "netns", "add", name], check=True, timeout=30)
    try:
        with Lab(1, None):
            assert {name: (FOLDER / name).exists() for name in (left, foreign, living)} == {
                left: False, foreign: True, living: True,
            }  # fmt: skip
    finally:
        for name in (foreign, living):
            subprocess.run(["ip", "netns", "del", name], check=True, timeout=30)


def test_a_cut_link_carries_nothing() -> None:
    with Lab(2, 100e6) as made:
        made.cut(1)
        result: list[str] = []

        def connect() -> None:
            made.links.enter(1)
            try:
                socket.create_connection((made.links.address(0), 9), timeout=1).close()
            except OSError as error:
                result.append(type(error).__name__)

        thread = threading.Thread(target=connect)
        thread.start()
        thread.join(30)
    assert result == ["TimeoutError"] or result == ["OSError"], result


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="ip and tc not found: install iproute2"):
        Lab(2, 1e9)
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="need root"):
        Lab(2, 1e9)
