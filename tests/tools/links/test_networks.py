"""What holds for links by namespaces and by a relay: rate, round-trip time, and bytes that are the compressor's."""

import torch

import thinwire
from support.link_ranks import TestedRank
from support.ports import listening
from support.transfer import Build, Transfer, round_trips
from thinwire.tools.links.network import network
from thinwire.tools.workers import Workers


def test_bytes_are_counted_and_no_faster_than_the_rate(build: Build) -> None:
    nbytes = 1_000_000
    with build(2, None) as net:
        net.shape(40e6)
        done = Transfer(net, nbytes)
    assert done.received == nbytes
    assert nbytes <= done.counted < 1.1 * nbytes  # TCP's and Ethernet's headers take 6 %
    assert done.seconds >= 0.9 * 8 * nbytes / 40e6  # a busy machine can only make it longer


def test_a_round_trip_takes_as_long_as_it_was_given(build: Build) -> None:
    with build(3, 100e6) as net:
        net.shape(100e6, 0.2)
        delayed = round_trips(net, 5)
        net.shape(100e6)
        direct = round_trips(net, 5)
    assert min(delayed) >= 0.2  # a busy machine can only make it longer
    assert min(delayed) < 0.4, "half of it passes in each direction, and not the whole"
    assert min(direct) < 0.1, "the delay ends when another speed is set"


def test_a_delay_does_not_limit_the_rate(build: Build) -> None:
    """What a link of 40 Mbit/s carries in a second; piece by piece it would take ten times as long."""
    nbytes = 5_000_000
    with build(2, None) as net:
        net.shape(40e6, 0.2)
        done = Transfer(net, nbytes)
    assert done.received == nbytes
    assert nbytes <= done.counted < 1.2 * nbytes  # headers, and packets that TCP sends again
    assert 0.9 * 8 * nbytes / 40e6 + 0.2 <= done.seconds < 8.0


def test_the_store_of_a_relay_listens_on_loopback_alone() -> None:
    with network(2, None, relay=True) as net, Workers(2, limit=60.0, links=net.links) as workers:
        workers.form(2, TestedRank)
        ports = [port for each in workers.ask("ports") for port in each]
        found = {place.address for place in listening() if place.port in ports}
    assert found
    assert all(address.endswith("7F") for address in found), found  # 127.x.x.x, as Linux writes it


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
