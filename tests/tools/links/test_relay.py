"""The relay: nothing passes it by, what it drops is reset, and it leaves no thread behind."""

import socket
import threading
from collections.abc import Iterator

import pytest

from thinwire.tools.links.relay import Relay
from thinwire.tools.links.relayed import redirected


@pytest.fixture
def relay() -> Iterator[Relay]:
    before = threading.active_count()
    with Relay(3, None) as made:
        yield made
    assert threading.active_count() == before


@pytest.fixture
def line(relay: Relay) -> Iterator[tuple[socket.socket, socket.socket]]:
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


def test_both_directions_are_counted(relay: Relay, line: tuple[socket.socket, socket.socket]) -> None:
    assert relay.sent_bytes() == [4, 2, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dropped_rank_has_its_connections_reset(
    rank: int, relay: Relay, line: tuple[socket.socket, socket.socket]
) -> None:
    relay.drop(rank)
    for end in line:
        with pytest.raises(ConnectionResetError):
            end.recv(9)


def test_others_go_on(relay: Relay, line: tuple[socket.socket, socket.socket]) -> None:
    near, far = line
    relay.drop(2)
    near.sendall(b"still")
    assert far.recv(9) == b"still"


def test_a_port_that_nobody_listens_at_closes(relay: Relay) -> None:
    with socket.create_server((relay.links.address(0), 0)) as server:
        port = server.getsockname()[1]
    with socket.create_connection(relay.links.reach(2, 0, port), timeout=20) as line:
        assert line.recv(9) == b""


def test_an_address_in_what_gloo_writes_leads_to_the_relay(relay: Relay) -> None:
    """The form that the operating system has for addresses, wherever it stands."""
    family = socket.AF_INET.to_bytes(2, "little") if socket.htons(1) != 1 else socket.AF_INET.to_bytes(2)
    ip = socket.inet_aton(relay.links.address(0))
    before, after = b"name\x00" + family, ip + b"\xff" * 8
    _, port = relay.links.reach(1, 0, 4321)
    assert port != 4321
    assert redirected(before + (4321).to_bytes(2) + after, relay.links, 1) == before + port.to_bytes(2) + after
    own = before + (4321).to_bytes(2) + after
    assert redirected(own, relay.links, 0) == own, "a rank reaches itself without a link"


@pytest.mark.parametrize("value", [b"", b"\x00" * 178, socket.inet_aton("127.83.0.1")])
def test_a_form_it_does_not_know_is_an_error(relay: Relay, value: bytes) -> None:
    with pytest.raises(RuntimeError, match="no address of a rank in what gloo left in its store"):
        redirected(value, relay.links, 1)


@pytest.mark.parametrize("rate", [5.0, 1e10, float("nan")])
def test_rates_beyond_it_are_refused(rate: float, relay: Relay) -> None:
    with pytest.raises(ValueError, match="expected 100 kbit/s to 2 Gbit/s through a relay"):
        Relay(2, rate)
    with pytest.raises(ValueError, match="expected 100 kbit/s to 2 Gbit/s through a relay"):
        relay.shape(rate)
