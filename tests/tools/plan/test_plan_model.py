"""The closed form, and what is advised.

What can be worked out by hand comes out, bytes are those of the collectives, nothing is free. The simplest method that
is about as fast as any is advised, local steps where sending every step is hopeless, and nothing where that is right.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from thinwire.collectives import cost
from thinwire.compressors import Compressor, compressor
from thinwire.tools.plan.costs import Costs, Speeds, buckets
from thinwire.tools.plan.local import HOPELESS, advise_local, predict_local
from thinwire.tools.plan.methods import BF16, DENSE, FP16, Method, methods_for
from thinwire.tools.plan.model import Case, Prediction
from thinwire.tools.plan.options import Cluster
from thinwire.tools.plan.show import WORTH, advise, choose, limit

TOPK, EIGHT = "topk:ratio=1/64,bits=2", "quantize:bits=8"
MADE: dict[str, Compressor] = {spec: compressor(spec) for spec in (EIGHT, TOPK)}
FREE = Speeds(
    origin="nothing", codecs=dict.fromkeys(MADE.values(), Costs()),
    operation=0, transfer=0, message=0, round=0, ring_byte=0, fp16_byte=0, spread_byte=0,
)  # fmt: skip
COSTLY = Speeds(
    origin="something", codecs=dict.fromkeys(MADE.values(), Costs(5e-10, 5e-10, 2e-10, 1e-10)), operation=5e-4,
    transfer=3e-4, message=2e-5, round=1e-4, ring_byte=8e-10, fp16_byte=1.7e-9, spread_byte=1e-9,
)  # fmt: skip
PLAIN = Cluster(8, 1e9, 0.0, share=1.0)
ADAMW, ATTACH = f"thinwire.AdamW {TOPK}", f"attach {EIGHT}"
RING = Method(DENSE)
OURS = Method(ADAMW, MADE[TOPK])  # gather with 2 ranks, sharded with 8


def case(params: int = 50_000_000, seconds: float = 0.3, speeds: Speeds = FREE, **changes: object) -> Case:
    """8 ranks on accelerators, links of 1 Gbit/s without latency. `changes` are to the cluster."""
    return Case(buckets(params, 4), seconds, replace(PLAIN, **changes), speeds)  # type: ignore[arg-type]


def slower(factor: float) -> Speeds:
    """COSTLY with a codec that takes `factor` times as long."""
    costs = {given: Costs(*(factor * seconds for seconds in each)) for given, each in COSTLY.codecs.items()}
    return replace(COSTLY, codecs=costs)


def predictions(given: Case) -> list[Prediction]:
    methods = methods_for(MADE, given.cluster, torch.float32, given.shard)
    return [given.predict(method) for method in methods]


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


# What is advised.


def chosen(given: Case) -> str:
    found = choose(predictions(given))
    assert found is not None
    return found.method.name


def test_slow_link_asks_for_the_fewest_bytes() -> None:
    given = case(speeds=COSTLY, rate=1e8)
    assert chosen(given) == ADAMW
    first, code, *others = advise(given, predictions(given))
    assert first.startswith(f"Use {ADAMW} (sharded): ")
    assert f"in place of {given.predict(Method(DENSE)).sent / 1e6:.0f} MB" in first
    assert f'thinwire.AdamW(ddp, lr=..., compressor="{TOPK}")' in code
    assert any(line.startswith("It pays on links below about ") for line in others)
    assert any("of memory. Its loss is not predicted" in line for line in others)


def test_fast_link_asks_for_nothing() -> None:
    given = case(speeds=COSTLY, rate=1e12)
    assert chosen(given) == DENSE
    first, *others = advise(given, predictions(given))
    assert first.startswith("Do not compress: a dense step takes ")
    assert others[0].startswith("Compression would pay on links below about ")


def test_half_the_bytes_are_enough_in_between() -> None:
    """Where the other half is hidden behind the backward pass, nothing else is worth its price."""
    for cores, name in ((1, FP16), (None, BF16)):
        given = case(200_000_000, 2.0, FREE, rate=6e9, cores=cores)
        assert chosen(given) == name
        first, code, *_ = advise(given, predictions(given))
        assert first.startswith(f"Use {name}: ")
        assert "ddp.register_comm_hook(None, " in code
    found = predictions(replace(given, shard=8))
    assert "MixedPrecisionPolicy" in advise(replace(given, shard=8), found)[1]


def test_eight_bits_come_before_a_sixty_fourth() -> None:
    found = [chosen(case(200_000_000, 2.0, FREE, rate=rate)) for rate in (1e8, 3e9, 1e12)]
    assert found == [ADAMW, ATTACH, DENSE]


def test_method_pays_up_to_the_bandwidth_that_is_named() -> None:
    given, method = case(speeds=COSTLY), Method(ADAMW, MADE[TOPK])
    (line,) = limit(given, method, "It pays")
    number, unit = line.partition("below about ")[2].split()[:2]
    rate = float(number) * {"Mbit/s": 1e6, "Gbit/s": 1e9}[unit]
    for factor, pays in ((0.9, True), (1.1, False)):
        there = given.at(rate=factor * rate)
        assert (there.seconds(Method(DENSE)) >= WORTH * there.seconds(method)) is pays
    assert limit(case(speeds=slower(1e9)), method, "It pays") == [], "never"


def test_method_that_does_not_fit_is_not_recommended() -> None:
    """Dense fits exactly, and so does half of the bytes; a residual does not."""
    need = 16 * 50_000_000
    slow = case(speeds=COSTLY, rate=1e8)
    assert chosen(slow) == ADAMW
    assert chosen(replace(slow, memory=need)) == BF16
    fast = replace(case(speeds=COSTLY, rate=1e12), memory=need)
    assert chosen(fast) == DENSE
    none = replace(slow, memory=1e6)
    assert choose(predictions(none)) is None
    (line,) = advise(none, predictions(none))
    assert "not even dense, which needs 800 MB" in line
    assert "--shard 1024)" in line


def far(**changes: object) -> Case:
    """Two ranks, 0.1 s of computing in a step, and a latency of 1 s; codec and bytes cost nothing."""
    return case(1_000_000, 0.1, **{"speeds": FREE, "world": 2, "rate": 1e15, "latency": 1.0, **changes})  # type: ignore[arg-type]


def test_local_steps_pay_for_an_exchange_once_in_a_round() -> None:
    """A delay hides the network, at most as many steps as a round has; the codec is not hidden."""
    (eight, delay, seconds, sent), (many, longer, short, few) = predict_local(far(), TOPK, MADE[TOPK])
    assert (eight, many, delay, longer) == (8, 32, 8, 11)  # 1 s and a little is 11 steps of 0.1 s
    assert seconds == pytest.approx(0.1 + (1.0 - 0.8) / 8, rel=1e-3)
    assert short == pytest.approx(0.1, rel=1e-3)
    assert sent == pytest.approx(4 * few)
    near, _ = predict_local(far(latency=0.01), TOPK, MADE[TOPK])
    assert near[1] == 1
    codec = slower(100)
    bound, _ = predict_local(far(latency=0.0, speeds=codec), TOPK, MADE[TOPK])
    costs = codec.codecs[MADE[TOPK]]
    assert bound[2] == pytest.approx(0.1 + 1e6 * (costs.encode + costs.commit + costs.decode(2)) / 8, rel=0.05)


def test_local_steps_are_recommended_only_where_sending_every_step_is_hopeless() -> None:
    for latency, is_hopeless in ((0.0, False), (0.06, False), (0.15, True), (1.0, True)):
        given = far(latency=latency)
        found = predictions(given)
        assert (min(one.seconds for one in found) >= HOPELESS * 0.1) is is_hopeless, latency
        assert bool(advise_local(given, found, MADE)) is is_hopeless, latency
    slow = far(latency=0.0, speeds=slower(1e5))  # for their codec, they take long themselves
    fastest = predict_local(slow, TOPK, MADE[TOPK])[1][2]
    assert fastest > 0.2
    for factor, pays in ((1.9, False), (2.1, True)):
        found = [replace(one, seconds=factor * fastest) for one in predictions(slow)]
        assert bool(advise_local(slow, found, MADE)) is pays, factor


def test_shortest_round_that_is_about_as_fast_is_recommended() -> None:
    for latency, every in ((0.3, 8), (2.0, 32)):
        given = far(latency=latency)
        first, code, last = advise_local(given, predictions(given), MADE)
        assert first.startswith("Sending every step is hopeless here: the fastest method (")
        assert "another algorithm, whose loss differs: docs/local-steps.md" in first
        assert f'every={every}, compressor="{TOPK}", delay=' in code
        assert last.startswith("If it has to be")


def test_no_local_steps_for_a_sharded_model_or_too_little_memory() -> None:
    sharded = replace(far(), shard=8)
    assert advise_local(sharded, predictions(sharded), MADE) == []
    need = 16 * 1_000_000
    for room, is_enough in ((15_000_000, False), (18_000_000, True)):  # 12 bytes for each parameter, 4 of the residual
        given = replace(far(), memory=need + room)
        assert bool(advise_local(given, predictions(given), MADE)) is is_enough, room
