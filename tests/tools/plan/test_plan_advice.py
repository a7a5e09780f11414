"""What is advised: the simplest method that is about as fast as any, and nothing at all where that is right."""

from dataclasses import replace

from support.plan_cases import COSTLY, EIGHT, FREE, MADE, TOPK, case
from thinwire.tools.plan.methods import BF16, DENSE, FP16, Method, methods_for
from thinwire.tools.plan.model import Case, Prediction
from thinwire.tools.plan.show import WORTH, advise, choose, pays_below

ADAMW, ATTACH = f"thinwire.AdamW {TOPK}", f"attach {EIGHT}"


def predictions(given: Case) -> list[Prediction]:
    return [given.predict(method) for method in methods_for(MADE, nccl=given.cluster.nccl)]


def chosen(given: Case) -> str:
    found = choose(predictions(given))
    assert found is not None
    return found.method.name


def test_a_slow_link_asks_for_the_fewest_bytes() -> None:
    given = case(speeds=COSTLY, rate=1e8)
    assert chosen(given) == ADAMW
    first, code, *others = advise(given, predictions(given))
    assert first.startswith(f"Use {ADAMW} (sharded): ")
    assert f'thinwire.AdamW(ddp, lr=..., compressor="{TOPK}"' in code
    assert any(line.startswith("It pays on links below about ") for line in others)
    assert any("loss is not predicted" in line for line in others)


def test_a_fast_link_asks_for_nothing() -> None:
    given = case(speeds=COSTLY.by_accelerator(), rate=1e12)
    assert chosen(given) == DENSE
    first, *others = advise(given, predictions(given))
    assert first.startswith("Do not compress: a dense step takes ")
    assert others[0].startswith("Compression would pay on links below about ")


def test_in_between_sixteen_bits_do() -> None:
    """Where the half of the bytes is hidden behind the backward pass, nothing else is worth its price."""
    given = case(200_000_000, 2.0, FREE, rate=6e9)
    assert chosen(given) == FP16
    first, code, *_ = advise(given, predictions(given))
    assert first.startswith("Use fp16 hook: ")
    assert "ddp.register_comm_hook(None, " in code
    with_nccl = replace(given, cluster=replace(given.cluster, nccl=True))
    times = {one.method.name: one.seconds for one in predictions(with_nccl)}
    assert times[BF16] == times[FP16]
    assert chosen(with_nccl) == BF16, "as fast, and nothing overflows"


def test_eight_bits_come_before_a_sixty_fourth() -> None:
    found = []
    for rate in (1e8, 3e9, 1e12):
        given = case(200_000_000, 2.0, FREE, rate=rate)
        found.append(chosen(given))
    assert found == [ADAMW, ATTACH, DENSE]


def test_memory_and_bytes_are_shown() -> None:
    given = case(speeds=COSTLY, rate=1e8)
    first = advise(given, predictions(given))[0]
    dense = given.predict(Method(DENSE))
    assert "of memory" in first
    assert f"in place of {dense.sent / 1e6:.0f} MB" in first


def test_up_to_which_bandwidth_it_pays() -> None:
    given = case(speeds=COSTLY)
    method = Method(ADAMW, MADE[TOPK])
    limit = pays_below(given, method)
    assert limit is not None
    for factor, pays in ((0.9, True), (1.1, False)):
        there = given.at(rate=factor * limit)
        assert (there.seconds(Method(DENSE)) >= WORTH * there.seconds(method)) is pays


def test_what_never_pays() -> None:
    slow = replace(COSTLY, codecs=COSTLY.faster(1e-9, "").codecs)
    assert pays_below(case(speeds=slow), Method(ADAMW, MADE[TOPK])) is None


def test_what_does_not_fit_is_not_recommended() -> None:
    """Dense fits exactly; a residual does not, and neither do buckets that are cast."""
    need = 16 * 50_000_000
    slow = case(speeds=COSTLY, rate=1e8)
    assert chosen(slow) == ADAMW
    assert chosen(case(speeds=COSTLY, rate=1e8, memory=need + 30e6)) == FP16
    tight = case(speeds=COSTLY, rate=1e8, memory=float(need))
    assert chosen(tight) == DENSE
    first, *_ = advise(tight, predictions(tight))
    assert "which does not fit the memory" in first
    none = case(speeds=COSTLY, rate=1e8, memory=1e6)
    assert choose(predictions(none)) is None
    first, *_ = advise(none, predictions(none))
    assert first.startswith("No method fits the memory of 1 MB of a rank, not even dense, which needs 800 MB for a ")
    assert "shard it over 1,024 ranks or more" in first


def test_a_hook_of_ddp_is_not_recommended_for_a_sharded_model() -> None:
    given = case(200_000_000, 2.0, FREE, rate=6e9)
    assert chosen(given) == FP16
    sharded = replace(given, shard=8)
    marked = [(one.is_ddp_only, one.is_usable) for one in predictions(sharded) if one.method.name == FP16]
    assert marked == [(True, False)]
    assert chosen(sharded) not in (FP16, DENSE)
