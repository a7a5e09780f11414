"""The closed form: what can be worked out by hand comes out, bytes are those of the collectives, nothing is free."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from support.plan_cases import COSTLY, FREE, MADE, TOPK, case
from thinwire.collectives import cost
from thinwire.collectives.plan import choose
from thinwire.compressors import compressor
from thinwire.sync.policy import Policy
from thinwire.tools.plan.cluster import Cluster, Transfer
from thinwire.tools.plan.costs import Bucket, Costs, Work, of_count, of_sizes
from thinwire.tools.plan.methods import BF16, DENSE, FP16, Method, exchanges, methods_for
from thinwire.tools.plan.show import advise

RING = Method(DENSE)
OURS = Method(f"thinwire.AdamW {TOPK}", MADE[TOPK])  # gather with 2 ranks, sharded with 8


def test_a_slow_link_is_all_that_counts() -> None:
    """The first bucket is small, and has been sent when the second is ready; from there on the wire never rests."""
    given = case()
    first, second = (bucket.numel for bucket in given.work.buckets[:2])
    wire = 2 * 7 / 8 * 4 * (50e6 - first) * 8 / 1e9
    ready = 0.1 + 0.2 * (first + second) / 50e6  # forward is a third, backward two
    assert given.seconds(RING) == pytest.approx(ready + wire, rel=1e-6)
    assert given.seconds(Method(FP16)) == pytest.approx(ready + wire / 2, rel=1e-6)


def test_a_fast_link_is_hidden_but_for_the_last_bucket() -> None:
    given = case(rate=1e12)
    last = given.work.buckets[-1].numel
    assert given.seconds(RING) == pytest.approx(0.3 + 2 * 7 / 8 * 4 * last * 8 / 1e12, rel=1e-6)


def test_latency_counts_for_every_round() -> None:
    slow = case(rate=1e12, latency=1e-3).seconds(RING) - case(rate=1e12).seconds(RING)
    assert slow >= 14e-3  # 2 (P - 1), of the last bucket
    trees = case(rate=1e12, latency=1e-3, nccl=True).seconds(RING) - case(rate=1e12).seconds(RING)
    assert 6e-3 <= trees < slow  # 2 log2 P
    sharded = case(rate=1e12, latency=1e-3).seconds(OURS) - case(rate=1e12).seconds(OURS)
    assert sharded == pytest.approx(2e-3)
    gathered = case(rate=1e12, latency=1e-3, world=2).seconds(OURS) - case(rate=1e12, world=2).seconds(OURS)
    assert gathered == pytest.approx(1e-3)


def test_who_shares_a_processor_is_slower() -> None:
    apart = case(speeds=COSTLY, rate=1e11, world=2, codec_slows=0.0).seconds(OURS)
    together = case(speeds=COSTLY, rate=1e11, world=2, codec_slows=1.0).seconds(OURS)
    assert apart < together < apart + 50e6 * 5e-10 + len(case().work.buckets) * COSTLY.operation
    assert case(speeds=COSTLY, rate=1e10, wire_slows=1.0).seconds(RING) > case(speeds=COSTLY, rate=1e10).seconds(RING)


def test_what_is_done_at_the_end_is_waited_for() -> None:
    costs = COSTLY.codecs[MADE[TOPK]]
    end = 50e6 * (costs.commit + costs.decode(2))
    assert case(speeds=COSTLY, rate=1e12, world=2, codec_slows=0.0).seconds(OURS) > 0.3 + end


@pytest.mark.parametrize("method", methods_for(MADE, nccl=True), ids=lambda method: method.name)
def test_a_faster_link_never_hurts(method: Method) -> None:
    times = [case(speeds=COSTLY, rate=rate, latency=1e-4).seconds(method) for rate in (1e8, 1e9, 1e10, 1e11)]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0.3


@pytest.mark.parametrize("spec", MADE)
@pytest.mark.parametrize("world", [2, 8])
def test_bytes_and_memory_are_those_of_the_collectives(spec: str, world: int) -> None:
    given, made = case(world=world), compressor(spec)
    found = given.predict(Method(f"attach {spec}", made))
    assert found.algorithm == ("gather" if world == 2 else "sharded")
    sizes = [bucket.numel for bucket in given.work.buckets]
    expected = [cost.of(found.algorithm, made, made.for_sum(world), size, torch.float32, world) for size in sizes]
    assert found.sent == pytest.approx(sum(one.sent for one in expected))
    assert found.messages == sum(one.messages for one in expected)
    assert found.buffers == sum(one.memory for one in expected)
    assert found.residual == 4 * 50_000_000 * (9 / 8 if world == 8 else 1)


def test_dense_methods_keep_nothing() -> None:
    given = case()
    for name, held in ((DENSE, 0), (FP16, 2 * 2 * 6553600), (BF16, 2 * 2 * 6553600)):
        found = given.predict(Method(name))
        assert (found.residual, found.buffers) == (0, held)


@pytest.mark.parametrize("world", [2, 3, 4, 64])
@pytest.mark.parametrize("small", [1, 16, 300, 4096, 4097, 8192, 300_000])
def test_small_parameters_go_as_the_library_sends_them(world: int, small: int) -> None:
    """One rule for time, bytes and the library itself, whatever the large parameters go by."""
    eight = compressor(Policy.small_compressor)
    chosen, _ = choose("auto", eight, eight.for_sum(world), small, torch.float32, world, can_shard=True)
    assert Method("", eight).algorithm(small, world) == chosen
    expected = cost.of(chosen, eight, eight.for_sum(world), small, torch.float32, world)
    bucket = Bucket(1_000_000, 1_000_000, small=small)
    first, _ = exchanges(OURS, bucket, Cluster(world, 1e9, 0.0), FREE)
    assert first.cost == expected
    sent = sum(phase.nbytes for phase in first.phases if isinstance(phase, Transfer))
    assert sent == pytest.approx(expected.sent), "what is timed is what is counted"
    assert len([phase for phase in first.phases if isinstance(phase, Transfer)]) == (1 if chosen == "gather" else 2)


def test_what_does_not_fit_the_memory_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = 16 * 50_000_000
    found = {room: case(memory=room) for room in (whole - 1, whole + 1, 2 * whole)}
    fits = {room: [given.predict(method).fits for method in (RING, OURS)] for room, given in found.items()}
    assert list(fits.values()) == [[False, False], [True, False], [True, True]]
    assert case().predict(OURS).fits
    monkeypatch.setenv("THINWIRE_MAX_BYTES", "1MiB")
    assert [case().predict(method).fits for method in (RING, OURS)] == [True, False]


def test_half_the_bytes_of_gradients_of_16_bits() -> None:
    wide, narrow = (
        Work.of_step(of_count(50_000_000, dtype), 0.3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert len(narrow.buckets) == pytest.approx(len(wide.buckets) / 2, abs=1), "DDP counts bytes"
    dense, half = (replace(case(), work=work) for work in (wide, narrow))
    assert half.predict(RING).sent == dense.predict(RING).sent / 2
    assert half.predict(OURS).residual == dense.predict(OURS).residual, "it has float32"
    assert [each.training_bytes(RING) for each in (dense, half)] == [16 * 50_000_000, 8 * 50_000_000]
    assert [each.training_bytes(OURS) for each in (dense, half)] == [16 * 50_000_000, 12 * 50_000_000]
    assert [method.name for method in methods_for({}, nccl=True, dtype=torch.bfloat16)] == [DENSE]


def test_a_channel_that_all_share_carries_every_byte_twice() -> None:
    """To the access point and from there, one after the other: 16 times as long with 8 ranks."""
    own, shared = (case(seconds=1e-6, is_shared=is_shared).seconds(RING) for is_shared in (False, True))
    assert shared == pytest.approx(16 * own, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"rate": 1e12}, "compute"),
        ({"rate": 1e8}, "bandwidth"),
        ({"rate": 1e12, "latency": 1.0}, "latency"),
        ({"rate": 1e12, "speeds": replace(FREE, message=1.0)}, "messages"),
        ({"rate": 1e12, "speeds": replace(FREE, codecs=dict.fromkeys(MADE.values(), Costs(1e-7, 0, 0)))}, "codec"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_limits_a_step(changes: dict[str, Any], limit: str) -> None:
    assert case(**changes).limited_by(OURS) == limit


def test_another_algorithm_where_that_of_auto_is_slower() -> None:
    """ "auto" counts bytes; the plan never shows it where a second round trip costs more than bytes."""
    near, far = (case(1_000_000, 0.01, latency=latency, rate=1e10) for latency in (0.0, 0.1))
    chosen = near.best(OURS)
    assert (chosen.algorithm, chosen.method.given) == ("sharded", "auto")
    assert far.predict(OURS).algorithm == "sharded"
    found = far.best(OURS)
    assert (found.algorithm, found.method.given) == ("gather", "gather")
    assert found.seconds < far.predict(OURS).seconds
    assert 'algorithm="gather")' in "".join(advise(far, [far.predict(RING), found]))
    room = far.training_bytes(OURS) + int(found.residual + found.buffers) - 1
    tight = replace(far, cluster=replace(far.cluster, memory=room))
    assert not tight.best(OURS).is_usable
    huge = case(1_000_000, 0.01, latency=0.1, rate=1e12, world=4096).best(OURS)
    assert huge.method.given == "auto", "4096 payloads do not fit any memory"


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
    assert [bucket.numel for bucket in of_sizes(sizes)] == expected
    assert sum(bucket.small for bucket in of_sizes(sizes)) == 300 + 12 + 1


def test_buckets_of_a_number() -> None:
    assert sum(bucket.numel for bucket in of_count(123_456_789)) == 123_456_789
    assert of_count(5) == (Bucket(5, 5),)
