"""Network namespaces and the relay: rate, bytes, faults in a step, and namespaces that come and go cleanly."""

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable

import pytest
import torch

import thinwire
from benchmarks.namespaces import Lab, network
from support.link_ranks import GRACE, OURS, TestedRank, disturb
from support.namespaces import FOLDER, ours, wait_until
from support.ports import listening
from support.processes import start_module
from support.transfer import Build, Transfer, round_trips
from thinwire.testing.pool import Workers
from thinwire.tools.links.relay import Relay

WORLD, TIMEOUT = 3, 4.0


# Both ---------------------------------------------------------------------------------------------------------------


def test_bytes_are_counted_and_no_faster_than_the_rate(build: Build) -> None:
    nbytes = 1_000_000
    with build(2, None) as net:
        net.shape(40e6)
        done = Transfer(net, nbytes)
    assert done.received == nbytes
    assert nbytes <= done.counted < 1.1 * nbytes  # TCP's and Ethernet's headers take 6 %
    assert done.seconds >= 0.9 * 8 * nbytes / 40e6  # a busy machine can only make it longer


def test_counted_bytes_are_those_of_the_compressor(build: Build) -> None:
    """Two ranks gather: each sends one payload to the other, of the size that the compressor computes beforehand."""
    numel, times = 300_000, 8
    with build(2, None) as net, Workers(2, limit=60.0, links=net.links) as workers:
        workers.form(2, TestedRank)
        for spec in ("topk:ratio=1/64,bits=2", "quantize:bits=8", "randomk:ratio=1/16"):
            workers.ask("reduce", spec, numel, 2)  # ranks compare their calls the first time
            before = net.sent_bytes()
            workers.ask("reduce", spec, numel, times)
            payload = times * thinwire.compressor(spec).nbytes(numel, torch.float32)
            for sent, first in zip(net.sent_bytes(), before, strict=True):
                assert payload < sent - first < 1.08 * payload + 1000 * times, spec


@pytest.mark.parametrize(
    ("kind", "fault", "method", "rank"),
    [
        pytest.param("relay", "drop", "dense", 1, id="relay drop dense", marks=pytest.mark.slow),
        pytest.param("relay", "drop", OURS, 0, id="relay drop ours"),
        pytest.param("namespaces", "cut", "dense", 1, id="namespaces cut dense", marks=pytest.mark.slow),
        pytest.param("namespaces", "cut", OURS, 1, id="namespaces cut ours"),
    ],
)
def test_a_connection_lost_in_a_step_is_an_error_on_all_ranks(
    kind: str, fault: str, method: str, rank: int, request: pytest.FixtureRequest
) -> None:
    """Reset, or a link cut, in the middle of a step: within the time-out."""
    if kind == "namespaces":
        request.getfixturevalue("untouched")
    given = {"method": method, "fault": fault, "rank": rank, "timeout": TIMEOUT}
    for raised, seconds in disturb(WORLD, **given, relay=kind == "relay"):  # type: ignore[arg-type]
        assert raised
        assert seconds < TIMEOUT + GRACE


# The relay ----------------------------------------------------------------------------------------------------------


def test_a_round_trip_takes_as_long_as_it_was_given() -> None:
    with Relay(3, 100e6) as net:
        net.shape(100e6, 0.2)
        delayed = round_trips(net, 5)
        net.shape(100e6)
        direct = round_trips(net, 5)
    assert min(delayed) >= 0.2  # a busy machine can only make it longer
    assert min(delayed) < 0.4, "half of it passes in each direction, and not the whole"
    assert min(direct) < 0.1, "the delay ends when another speed is set"


def test_a_delay_does_not_limit_the_rate() -> None:
    """What a link of 40 Mbit/s carries in a second; piece by piece it would take ten times as long."""
    nbytes = 5_000_000
    with network(2, 40e6, 0.2, relay=False) as net:
        assert isinstance(net, Relay), "only a relay has a round-trip time"
        done = Transfer(net, nbytes)
    assert done.received == nbytes
    assert nbytes <= done.counted < 1.2 * nbytes
    assert 0.9 * 8 * nbytes / 40e6 + 0.2 <= done.seconds < 8.0


def test_the_store_of_a_relay_listens_on_loopback_alone() -> None:
    with Relay(2, None) as net, Workers(2, limit=60.0, links=net.links) as workers:
        workers.form(2, TestedRank)
        ports = [port for each in workers.ask("ports") for port in each]
        found = {place.address for place in listening() if place.port in ports}
    assert found
    assert all(address.endswith("7F") for address in found), found  # 127.x.x.x, as Linux writes it


# Namespaces ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("lab_can_be_built")
def test_a_lab_comes_and_goes(untouched: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab(3, 1e9) as made:
        assert ours() == set(made.links.namespaces)
        untouched()
        assert Transfer(made, 100_000).received == 100_000
    assert not ours()
    with pytest.raises(KeyError), Lab(2, 1e9):
        raise KeyError
    assert not ours(), "after an error inside"
    monkeypatch.setattr(Lab, "shape", lambda self, rate: 1 / 0)
    with pytest.raises(ZeroDivisionError), Lab(2, 1e9):
        pass
    assert not ours(), "after an error while it is built"


@pytest.mark.usefixtures("lab_can_be_built", "untouched")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_namespace(number: signal.Signals) -> None:
    process = start_module("held_lab")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(ours(process.pid)) == 3
    process.send_signal(number)
    process.communicate(timeout=30)
    wait_until(lambda: not ours(process.pid))


@pytest.mark.usefixtures("lab_can_be_built", "untouched")
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


@pytest.mark.usefixtures("lab_can_be_built", "untouched")
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


def test_a_lab_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="ip and tc not found: install iproute2"):
        Lab(2, 1e9)
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="need root"):
        Lab(2, 1e9)
