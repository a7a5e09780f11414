"""The closed form: what can be worked out by hand comes out, bytes are those of the collectives, nothing is free."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from support.plan_cases import COSTLY, FREE, MADE, TOPK, case, predictions
from thinwire.collectives import cost
from thinwire.compressors import compressor
from thinwire.tools.plan.costs import Costs, buckets
from thinwire.tools.plan.methods import BF16, DENSE, FP16, Method, methods_for

RING = Method(DENSE)
OURS = Method(f"thinwire.AdamW {TOPK}", MADE[TOPK])  # gather with 2 ranks, sharded with 8


def test_slow_link_is_never_idle_from_the_second_bucket_on() -> None:
    """The first bucket is small, and has been sent when the second is ready."""
    given = case()
    first, second = given.buckets[:2]
    wire = 2 * 7 / 8 * 4 * (50e6 - first) * 8 / 1e9
    ready = 0.1 + 0.2 * (first + second) / 50e6  # forward is a third, backward two
    assert given.seconds(RING) == pytest.approx(ready + wire, rel=1e-6)
    assert given.seconds(Method(FP16)) == pytest.approx(ready + wire / 2, rel=1e-6)


def test_fast_link_is_hidden_but_for_the_last_bucket() -> None:
    given = case(rate=1e12)
    assert given.seconds(RING) == pytest.approx(0.3 + 2 * 7 / 8 * 4 * given.buckets[-1] * 8 / 1e12, rel=1e-6)


def test_latency_counts_for_every_round() -> None:
    def added(method: Method, **changes: object) -> float:
        return case(rate=1e12, latency=1e-3, **changes).seconds(method) - case(rate=1e12, **changes).seconds(method)

    assert added(RING, cores=1) >= 14e-3  # 2 (P - 1), of the last bucket
    assert 6e-3 <= added(RING) < 14e-3  # 2 log2 P by trees of NCCL
    assert added(OURS) == pytest.approx(2e-3)
    assert added(OURS, world=2) == pytest.approx(1e-3)


def test_ranks_that_share_a_cpu_with_the_codec_are_slower() -> None:
    apart, shared = (case(speeds=COSTLY, rate=1e11, world=2, cores=cores).seconds(OURS) for cores in (None, 1))
    assert apart < shared < apart + 50e6 * (5e-10 + 2e-9) + len(case().buckets) * 1e-3
    wires = [case(speeds=COSTLY, rate=1e10, cores=cores).seconds(RING) for cores in (None, 64, 1)]
    assert wires == sorted(wires)
    assert wires[0] < wires[-1]
    costs = COSTLY.codecs[MADE[TOPK]]
    end = 0.3 + 50e6 * (costs.commit + costs.decode(2))
    assert case(speeds=COSTLY, rate=1e12, world=2).seconds(OURS) > end, "residual and result are written at the end"


def test_faster_link_is_never_slower() -> None:
    for method in methods_for(MADE, case().cluster, torch.float32):
        times = [case(speeds=COSTLY, rate=rate, latency=1e-4).seconds(method) for rate in (1e8, 1e9, 1e10, 1e11)]
        assert times == sorted(times, reverse=True), method.name
        assert times[-1] > 0.3, method.name


def test_bytes_and_memory_are_those_of_the_collectives() -> None:
    for spec, world in ((spec, world) for spec in MADE for world in (2, 8)):
        given, made = case(world=world), compressor(spec)
        found = given.predict(Method(f"attach {spec}", made))
        assert found.algorithm == ("gather" if world == 2 else "sharded"), (spec, world)
        expected = [
            cost.of(found.algorithm, made, made.for_sum(world), size, torch.float32, world) for size in given.buckets
        ]
        assert found.sent == pytest.approx(sum(one.sent for one in expected)), (spec, world)
        assert found.messages == sum(one.messages for one in expected), (spec, world)
        assert found.buffers == sum(one.memory for one in expected), (spec, world)
        assert found.residual == 4 * 50_000_000 * (9 / 8 if world == 8 else 1), (spec, world)


def test_dense_half_and_few_elements_keep_nothing_and_send_all() -> None:
    """With so few elements that compression would not be smaller, the library sends them as they are."""
    dense, half = (case().predict(Method(name)) for name in (DENSE, BF16))
    assert (dense.residual, dense.buffers, half.residual, half.buffers) == (0, 0, 0, 0)
    assert dense.sent == sum(cost.ring(4 * size, 8) for size in case().buckets) == 2 * half.sent
    few = case(5).predict(OURS)
    assert (few.algorithm, few.sent) == ("dense", cost.of("dense", MADE[TOPK], MADE[TOPK], 5, torch.float32, 8).sent)


def test_method_fits_if_all_it_keeps_does() -> None:
    whole = 16 * 50_000_000
    fits = [
        [replace(case(), memory=room).predict(method).fits for method in (RING, OURS)]
        for room in (whole - 1, whole + 1, 2 * whole, None)
    ]
    assert fits == [[False, False], [True, False], [True, True], [True, True]]


def test_gradients_of_16_bits_take_half_the_bytes() -> None:
    wide = case()
    narrow = replace(wide, buckets=buckets(50_000_000, 2), dtype=torch.bfloat16)
    assert len(narrow.buckets) == pytest.approx(len(wide.buckets) / 2, abs=1), "DDP counts bytes"
    assert narrow.predict(RING).sent == wide.predict(RING).sent / 2
    assert narrow.predict(OURS).residual == wide.predict(OURS).residual, "it has float32"
    assert [each.training_bytes(RING) for each in (wide, narrow)] == [16 * 50_000_000, 8 * 50_000_000]
    assert [each.training_bytes(OURS) for each in (wide, narrow)] == [16 * 50_000_000, 12 * 50_000_000]


def test_methods_are_those_that_work_there() -> None:
    accelerator = case().cluster
    processor = replace(accelerator, cores=4)

    def halves(cluster: Any, dtype: torch.dtype = torch.float32, shard: int = 1) -> list[str]:
        return [one.name for one in methods_for({}, cluster, dtype, shard)]

    assert halves(accelerator) == halves(accelerator, shard=8) == [DENSE, BF16]
    assert halves(processor) == [DENSE, FP16]
    assert halves(processor, shard=8) == [DENSE], "FSDP has no such hook"
    assert halves(accelerator, torch.bfloat16) == [DENSE], "they are 16 bits already"
    assert [one.method.name for one in predictions(case())][2:] == ["attach quantize:bits=8", OURS.name]
    backwards = methods_for(dict(reversed(MADE.items())), accelerator, torch.float32)
    assert [one.name for one in backwards][2:] == ["attach quantize:bits=8", OURS.name], "the simplest first"


def test_part_that_limits_a_step() -> None:
    cases: dict[str, dict[str, Any]] = {
        "compute": {"rate": 1e12},
        "bandwidth": {"rate": 1e8},
        "latency": {"rate": 1e12, "latency": 1.0},
        "messages": {"rate": 1e12, "speeds": replace(FREE, message=1.0)},
        "codec": {"rate": 1e12, "speeds": replace(FREE, codecs=dict.fromkeys(MADE.values(), Costs(1e-7, 0, 0)))},
    }
    assert {part: case(**changes).limited_by(OURS) for part, changes in cases.items()} == {part: part for part in cases}


def test_buckets_are_those_of_ddp() -> None:
    """As torch itself puts them together, of many small parameters."""
    tensors = [torch.empty(1024, device="meta")] * 30_000
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [1 << 20, 25 << 20])
    expected = [sum(tensors[index].numel() for index in bucket) for bucket in indices]
    assert list(buckets(1024 * 30_000, 4)) == expected
    assert buckets(5, 4) == (5,)
    assert sum(buckets(123_456_789, 2)) == 123_456_789
