"""The closed form: what can be worked out by hand comes out, bytes are those of the collectives, nothing is free."""

from dataclasses import replace

import pytest
import torch
from plan_cases import COSTLY, EIGHT, FREE, MADE, PLAIN, TOPK, case

from thinwire.collectives import cost
from thinwire.compressors import compressor
from thinwire.tools.plan.cluster import Cluster
from thinwire.tools.plan.model import Case
from thinwire.tools.plan.ways import BF16, DENSE, FP16, Way, ways
from thinwire.tools.plan.work import Bucket, Work, of_count, of_sizes

RING = Way(DENSE, "ring")
GATHER, SHARDED = Way(TOPK, "gather", False, "thinwire.AdamW"), Way(TOPK, "sharded", False, "thinwire.AdamW")


def test_a_slow_link_is_all_that_counts() -> None:
    """The first bucket is small, and has been sent when the second is ready; from there on the wire never rests."""
    given = case()
    first, second = (bucket.entries for bucket in given.work.buckets[:2])
    wire = 2 * 7 / 8 * 4 * (50e6 - first) * 8 / 1e9
    ready = 0.1 + 0.2 * (first + second) / 50e6  # forward is a third, backward two
    assert given.seconds(RING) == pytest.approx(ready + wire, rel=1e-6)
    assert given.seconds(Way(FP16, "ring")) == pytest.approx(ready + wire / 2, rel=1e-6)


def test_a_fast_link_is_hidden_but_for_the_last_bucket() -> None:
    given = case(rate=1e12)
    last = given.work.buckets[-1].entries
    assert given.seconds(RING) == pytest.approx(0.3 + 2 * 7 / 8 * 4 * last * 8 / 1e12, rel=1e-6)


def test_latency_counts_for_every_round() -> None:
    slow = case(rate=1e12, latency=1e-3).seconds(RING) - case(rate=1e12).seconds(RING)
    assert slow >= 14e-3  # 2 (P - 1), of the last bucket
    trees = case(rate=1e12, latency=1e-3, trees=True).seconds(RING) - case(rate=1e12).seconds(RING)
    assert 6e-3 <= trees < slow  # 2 log2 P
    gathered = case(rate=1e12, latency=1e-3).seconds(GATHER) - case(rate=1e12).seconds(GATHER)
    assert gathered == pytest.approx(1e-3)


def test_who_shares_a_processor_is_slower() -> None:
    apart = case(speeds=COSTLY, rate=1e11, codec_slows=0.0).seconds(GATHER)
    together = case(speeds=COSTLY, rate=1e11, codec_slows=1.0).seconds(GATHER)
    assert apart < together < apart + 50e6 * 5e-10 + len(case().work.buckets) * COSTLY.operation
    assert case(speeds=COSTLY, rate=1e10, wire_slows=1.0).seconds(RING) > case(speeds=COSTLY, rate=1e10).seconds(RING)


def test_what_is_done_at_the_end_is_waited_for() -> None:
    costs = COSTLY.codecs[TOPK]
    end = 50e6 * (costs.commit + costs.decode(8))
    assert case(speeds=COSTLY, rate=1e12, codec_slows=0.0).seconds(GATHER) > 0.3 + end


@pytest.mark.parametrize("way", ways(MADE, PLAIN), ids=lambda way: f"{way.name} {way.algorithm}")
def test_a_faster_link_never_hurts(way: Way) -> None:
    times = [case(speeds=COSTLY, rate=rate, latency=1e-4).seconds(way) for rate in (1e8, 1e9, 1e10, 1e11)]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0.3


def test_ranks_of_a_host_share_its_link() -> None:
    alone, four = case(rate=1e8), case(rate=1e8, ranks_per_host=4)
    assert four.seconds(SHARDED) > 2 * alone.seconds(SHARDED)
    assert four.seconds(RING) == pytest.approx(alone.seconds(RING), rel=0.01)  # one of them has its neighbour outside
    inside = replace(SHARDED, in_hosts=True)
    assert four.seconds(inside) < four.seconds(SHARDED)


@pytest.mark.parametrize("spec", MADE)
@pytest.mark.parametrize("algorithm", ["gather", "sharded"])
def test_bytes_and_memory_are_those_of_the_collectives(spec: str, algorithm: str) -> None:
    given, made = case(), compressor(spec)
    found = given.predict(Way(spec, algorithm, False, "attach")).footprint
    sizes = [bucket.entries for bucket in given.work.buckets]
    expected = [cost.of(algorithm, made, made.for_sum(8), size, torch.float32, 8) for size in sizes]
    assert found.sent == pytest.approx(sum(one.sent for one in expected))
    assert found.messages == sum(one.messages for one in expected)
    assert found.buffers == sum(one.memory for one in expected)
    assert found.residual == 4 * 50_000_000 * (9 / 8 if algorithm == "sharded" else 1)
    assert found.inside == 0


def test_bytes_of_hosts_are_told_apart() -> None:
    found = case(ranks_per_host=4).predict(Way(TOPK, "gather", True, "attach")).footprint
    assert found.inside == pytest.approx(2 * 3 / 4 * 4 * 50e6)
    assert found.sent - found.inside == pytest.approx(MADE[TOPK].nbytes(50_000_000) / 4, rel=0.01)  # to one other host


def test_the_dense_ways_keep_nothing() -> None:
    given = case()
    for spec, held in ((DENSE, 0), (FP16, 2 * 2 * 6553600), (BF16, 2 * 2 * 6553600)):
        found = given.predict(Way(spec, "ring")).footprint
        assert (found.residual, found.buffers) == (0, held)


def test_small_parameters_go_in_eight_bits() -> None:
    """A byte for each element, large or small, whatever the large ones go by: small ones of one record to every other
    rank at once, of several in shares, which come back as sums."""
    eight = MADE[EIGHT]
    shared = cost.sharded(eight, eight, 8192, torch.float32, 4).sent
    assert shared < 3 * eight.nbytes(8192)
    for world, small, sent, messages in (
        (2, 3000, eight.nbytes(3000), 1),
        (2, 8192, eight.nbytes(8192), 1),
        (4, 3000, 3 * eight.nbytes(3000), 3),
        (4, 8192, shared, 6),
    ):
        work = Work((Bucket(1_000_000, 1_000_000, small=small),), 0.1, 0.1, 0.1)
        given = Case(work, replace(PLAIN, world=world), FREE)
        for spec in (EIGHT, TOPK):
            found = given.predict(Way(spec, "gather", False, "attach")).footprint
            assert found.sent == (world - 1) * MADE[spec].nbytes(1_000_000) + sent
            assert found.messages == world - 1 + messages
    work = Work((Bucket(1_000_000, 1_000_000, small=3000),), 0.1, 0.1, 0.1)
    slow = Case(work, replace(PLAIN, world=2, rate=1e6), FREE)
    without = replace(slow, work=Work((Bucket(1_000_000, 1_000_000),), 0.1, 0.1, 0.1))
    way = Way(EIGHT, "gather", False, "attach")
    assert slow.seconds(way) - without.seconds(way) == pytest.approx(8 * 3000 / 1e6, rel=0.2)  # once, and headers


def test_small_parameters_wait_for_each_other() -> None:
    """Until there are a megabyte of them, or the step has no further bucket."""
    first, last = of_sizes([8_000_000, *[1000] * 300])  # the last ones first
    assert (first.compressed, first.small, last.small) == (0, 263_000, 37_000)
    few = of_sizes([8_000_000, 100, 8_000_000, 200, 8_000_000])
    assert [bucket.small for bucket in few] == [0, 0, 300]
    assert [bucket.compressed for bucket in few] == [8_000_000, 8_000_200, 8_000_100]


def test_buckets_are_those_of_ddp() -> None:
    """As torch itself puts them together, whatever the sizes."""
    sizes = [300, 70_000, 4096, 9_000_000, 12, 5_000_000, 800_000, 2_000_000, 6_553_600, 1]
    tensors = [torch.empty(size, device="meta") for size in reversed(sizes)]
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [1 << 20, 25 << 20])
    expected = [sum(tensors[index].numel() for index in bucket) for bucket in indices]
    assert [bucket.entries for bucket in of_sizes(sizes)] == expected
    assert sum(bucket.small for bucket in of_sizes(sizes)) == 300 + 12 + 1


def test_buckets_of_a_number() -> None:
    assert sum(bucket.entries for bucket in of_count(123_456_789)) == 123_456_789
    assert of_count(5) == (Bucket(5, 5),)


def test_a_world_has_two_ranks_at_least() -> None:
    with pytest.raises(AssertionError):
        Cluster(1, 1e9, 0.0)
