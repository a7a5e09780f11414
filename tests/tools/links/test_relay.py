"""The relay: rates, round-trip times and bytes are right, nothing passes it by, and it leaves no thread behind."""

import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import thinwire
from support.ports import listening, ports_of_this_process
from thinwire.testing.pool import Workers
from thinwire.tools.links.relay import Relay
from thinwire.tools.links.relayed import redirected

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs addresses of 127.0.0.0/8")
Line = tuple[socket.socket, socket.socket]


@pytest.fixture
def relay() -> Iterator[Relay]:
    before = threading.active_count()
    with Relay(3, None) as made:
        yield made
    assert threading.active_count() == before


@pytest.fixture
def line(relay: Relay) -> Iterator[Line]:
    """A connection from rank 1 to rank 0, both ends of it."""
    with socket.create_server((relay.links.address(0), 0)) as server:
        server.settimeout(20)
        near = socket.create_connection(relay.links.reach(1, 0, server.getsockname()[1]), timeout=20)
        far, _ = server.accept()
        far.settimeout(20)
        with near, far:
            near.sendall(b"to")
            assert far.recv(9) == b"to"
            far.sendall(b"back")
            assert near.recv(9) == b"back"
            yield near, far


def read(end: socket.socket, nbytes: int) -> int:
    got = 0
    while got < nbytes and (data := end.recv(1 << 20)):
        got += len(data)
    return got


def send(line: Line, nbytes: int) -> float:
    """Send from rank 1 to rank 0. Return the seconds until all has arrived."""
    started = time.monotonic()
    with ThreadPoolExecutor(1) as other:
        got = other.submit(read, line[1], nbytes)
        line[0].sendall(bytes(nbytes))
        assert got.result(40) == nbytes
    return time.monotonic() - started


def test_bytes_are_counted_and_no_faster_than_the_rate(relay: Relay, line: Line) -> None:
    assert relay.sent_bytes() == [4, 2, 0]
    nbytes = 1_000_000
    relay.shape(40e6)
    assert send(line, nbytes) >= 0.9 * 8 * nbytes / 40e6  # a busy machine can only make it longer
    assert relay.sent_bytes() == [4, 2 + nbytes, 0]


def test_a_round_trip_takes_as_long_as_it_was_given_and_does_not_limit_the_rate(relay: Relay, line: Line) -> None:
    def round_trip() -> float:
        started = time.monotonic()
        line[0].sendall(b".")
        line[1].sendall(line[1].recv(1))
        assert line[0].recv(1) == b"."
        return time.monotonic() - started

    relay.shape(100e6, 0.2)
    delayed = [round_trip() for _ in range(5)]
    assert 0.2 <= min(delayed) < 0.4, "half of it passes in each direction, and not the whole"
    relay.shape(40e6, 0.2)
    nbytes = 5_000_000  # what the link carries in a second; piece by piece it would take ten times as long
    assert 0.9 * 8 * nbytes / 40e6 + 0.1 <= send(line, nbytes) < 8.0
    relay.shape(None)
    assert min(round_trip() for _ in range(5)) < 0.1, "the delay ends when another speed is set"


def test_a_connection_that_one_end_resets_is_reset_for_the_other(line: Line) -> None:
    near, far = line
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    near.close()
    with pytest.raises(ConnectionResetError):
        far.recv(9)


def test_a_cut_rank_gets_nothing_and_no_error(relay: Relay, line: Line) -> None:
    relay.cut(0)
    for one, other in (line, line[::-1]):
        one.sendall(b"lost")
        other.settimeout(0.3)
        with pytest.raises(TimeoutError):
            other.recv(9)
    assert relay.sent_bytes() == [4, 2, 0]


def test_a_port_that_nobody_listens_at_closes(relay: Relay) -> None:
    with socket.create_server((relay.links.address(0), 0)) as server:
        port = server.getsockname()[1]
    with socket.create_connection(relay.links.reach(2, 0, port), timeout=20) as line:
        assert line.recv(9) == b""


def test_an_address_in_what_gloo_writes_leads_to_the_relay(relay: Relay) -> None:
    """The form that the operating system has for addresses, wherever it stands. Another form is an error."""
    family = socket.AF_INET.to_bytes(2, "little") if socket.htons(1) != 1 else socket.AF_INET.to_bytes(2)
    ip = socket.inet_aton(relay.links.address(0))
    before, after = b"name\x00" + family, ip + b"\xff" * 8
    _, port = relay.links.reach(1, 0, 4321)
    assert port != 4321
    assert redirected(before + (4321).to_bytes(2) + after, relay.links, 1) == before + port.to_bytes(2) + after
    own = before + (4321).to_bytes(2) + after
    assert redirected(own, relay.links, 0) == own, "a rank reaches itself without a link"
    for value in (b"", b"\x00" * 178, ip):
        with pytest.raises(RuntimeError, match="no address of a rank in what gloo left in its store"):
            redirected(value, relay.links, 1)


def test_rates_beyond_it_are_refused(relay: Relay) -> None:
    for rate in (5.0, 1e10, float("nan")):
        for shape in (relay.shape, lambda rate: Relay(2, rate)):
            with pytest.raises(ValueError, match="expected 100 kbit/s to 2 Gbit/s through a relay"):
                shape(rate)


class Reducing:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank

    def ports(self) -> list[int]:
        return ports_of_this_process()

    def reduce(self, spec: str, numel: int, times: int) -> None:
        """All-reduce a tensor, again and again."""
        residual = torch.zeros(numel)
        for _ in range(times):
            thinwire.all_reduce_compressed(torch.randn(numel), spec, residual)


def test_groups_connect_through_it_and_send_the_bytes_of_the_compressor() -> None:
    """Two ranks gather: each sends one payload to the other, of the size that the compressor computes beforehand."""
    numel, times = 300_000, 8
    with Relay(2, None) as relay, Workers(2, limit=60.0, links=relay.links) as workers:
        workers.form(2, Reducing)
        ports = [port for each in workers.ask("ports") for port in each]
        found = {place.address for place in listening() if place.port in ports}
        assert found, "rank 0 hosts the store"
        assert all(address.endswith("7F") for address in found), found  # 127.x.x.x, as Linux writes it
        for spec in ("topk:ratio=1/64,bits=2", "quantize:bits=8", "randomk:ratio=1/16"):
            workers.ask("reduce", spec, numel, 2)  # ranks compare their calls the first time
            before = relay.sent_bytes()
            workers.ask("reduce", spec, numel, times)
            payload = times * thinwire.compressor(spec).nbytes(numel, torch.float32)
            for sent, first in zip(relay.sent_bytes(), before, strict=True):
                assert payload < sent - first < 1.08 * payload + 1000 * times, spec
