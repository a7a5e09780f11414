"""The lab: namespaces that come and go cleanly, links that have the rate they were given, and cut ones that say so."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.bench.link import lab
from thinwire.bench.link.lab import Lab

FOLDER = Path("/run/netns")


@pytest.fixture(autouse=True)
def _can_be_built() -> None:
    reason = lab.why_not()
    if reason is not None:
        assert not os.environ.get("CI"), f"in CI the lab must run: {reason}"
        pytest.skip(reason)


def ours(process: int | None = None) -> set[str]:
    return {path.name for path in FOLDER.glob(f"thinwire-{process or os.getpid()}-*")}


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def wait_until(condition: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


class Transfer:
    """Sends bytes from rank 1 to rank 0, each in a thread that has entered its namespace."""

    def __init__(self, links: lab.Links, nbytes: int) -> None:
        self.received, self.counted, self.seconds, self.error = 0, 0, 0.0, ""
        port: list[int] = []
        ready = threading.Event()

        def receive() -> None:
            links.enter(0)
            with socket.create_server((links.address(0), 0)) as server:
                server.settimeout(20)
                port.append(server.getsockname()[1])
                ready.set()
                line, _ = server.accept()
                with line:
                    line.settimeout(20)
                    while data := line.recv(1 << 20):
                        self.received += len(data)

        def send() -> None:
            links.enter(1)
            assert ready.wait(20)
            before, started = lab.sent_bytes(), time.perf_counter()
            try:
                with socket.create_connection((links.address(0), port[0]), timeout=20) as line:
                    line.sendall(bytes(nbytes))
                    line.shutdown(socket.SHUT_WR)
                    line.recv(1)
            except OSError as error:
                self.error = str(error)
            self.seconds, self.counted = time.perf_counter() - started, lab.sent_bytes() - before

        threads = [threading.Thread(target=target) for target in (receive, send)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def before() -> Iterator[set[str]]:
    there = interfaces()
    yield there
    assert interfaces() == there, "an interface of the machine was touched"


def test_it_comes_and_goes(before: set[str]) -> None:
    with Lab(3, 1e9) as made:
        assert ours() == set(made.links.namespaces)
        assert interfaces() == before
        assert Transfer(made.links, 100_000).received == 100_000
    assert not ours()


def test_a_link_has_its_rate_and_counts_its_bytes(before: set[str]) -> None:
    """At two rates in one run: the slower takes about as many times longer as it is slower."""
    nbytes = 3_000_000
    with Lab(2, 400e6) as made:
        fast = Transfer(made.links, nbytes)
        made.shape(40e6)
        slow = Transfer(made.links, nbytes)
    for one in (fast, slow):
        assert one.received == nbytes
        assert nbytes < one.counted < 1.1 * nbytes
    assert slow.seconds >= 0.9 * nbytes * 8 / 40e6  # never faster than its rate, whatever the machine does
    assert slow.seconds > 2 * fast.seconds


def test_an_error_inside_leaves_nothing(before: set[str]) -> None:
    with pytest.raises(KeyError), Lab(2, 1e9):
        raise KeyError
    assert not ours()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(number: signal.Signals, before: set[str]) -> None:
    script = (
        "import time\n"
        "from thinwire.bench.link.lab import Lab\n"
        "with Lab(2, 1e9):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert len(ours(process.pid)) == 3
    process.send_signal(number)
    process.wait(30)
    process.stdout.close()
    wait_until(lambda: not ours(process.pid))


def test_what_a_guard_could_not_remove_is_swept_up(before: set[str]) -> None:
    """As after a loss of power of the guard too: names of a process that is gone."""
    gone = subprocess.Popen(["true"])
    gone.wait(30)
    name = f"thinwire-{gone.pid}-0"
    subprocess.run(["ip", "netns", "add", name], check=True, timeout=30)
    with Lab(1, None):
        assert not (FOLDER / name).exists()


def test_a_cut_link_carries_nothing(before: set[str]) -> None:
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


@pytest.mark.parametrize(
    ("ranks", "rate", "message"),
    [(0, 1e9, "0 ranks, expected 1 to 64"), (2, 5.0, "a rate of 5 bit/s, expected 100 kbit/s or more")],
)
def test_nonsense_is_refused(ranks: int, rate: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lab(ranks, rate)
    assert not ours()


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="ip and tc not found: install iproute2"):
        Lab(2, 1e9)
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="need root"):
        Lab(2, 1e9)
