"""The plan of an all-reduce: which algorithm and how many segments, for worlds that no test could run."""

import math
from itertools import product

import pytest
import torch

import thinwire
from thinwire.collectives import cost
from thinwire.collectives.plan import DEFAULT_MAX_BYTES, choose, max_bytes, plan
from thinwire.collectives.transport.wire import AT_ONCE

TOPK = thinwire.TopK(ratio="1/64", bits=2)
CHUNK, RECORD = 4096, 84
WORLDS = [2**i for i in range(1, 13)]


def make(algorithm: str, numel: int, ranks: int, budget: int, in_node: int = 1):
    return plan(
        algorithm, "given by the caller", TOPK, TOPK.for_sum(ranks), numel, torch.float32, ranks, in_node, budget
    )


def test_bytes_and_messages_are_those_of_the_formulas() -> None:
    """With a record for each rank to own, and more, the closed formulas of docs/collectives.md hold exactly."""
    for ranks in WORLDS:
        numel = CHUNK * ranks * 3
        payload, second = 3 * ranks * RECORD, TOPK.for_sum(ranks).nbytes(numel)
        assert TOPK.nbytes(numel) == payload
        gather = cost.gather(TOPK, numel, torch.float32, ranks)
        sharded = cost.sharded(TOPK, TOPK.for_sum(ranks), numel, torch.float32, ranks)
        dense = cost.dense(numel, torch.float32, ranks)
        assert (gather.sent, gather.messages) == ((ranks - 1) * payload, ranks - 1)
        assert math.isclose(sharded.sent, (payload + second) * (ranks - 1) / ranks), ranks
        assert sharded.messages == dense.messages == 2 * (ranks - 1)
        assert math.isclose(dense.sent, 8 * numel * (ranks - 1) / ranks), ranks
        assert ranks < 8 or TOPK.for_sum(ranks) == TOPK.for_sum(8), "from there on, sharded is flat in the world"


def test_memory_stays_within_the_budget_at_any_world_size() -> None:
    for algorithm, ranks in product(("gather", "sharded", "dense"), WORLDS):
        made = make(algorithm, 25_000_000, ranks, DEFAULT_MAX_BYTES)
        assert made.cost.memory <= DEFAULT_MAX_BYTES // AT_ONCE, (algorithm, ranks)
        smallest = make(algorithm, 25_000_000, ranks, 128 << 20)
        assert smallest.cost.memory <= 32 << 20, (algorithm, ranks)
        assert len(smallest.segments) >= len(made.segments)


def test_segments_cover_every_element_once_in_whole_records() -> None:
    for case in product((0, 1, 4095, 4096, 4097, 100_003), (1, 2, 3, 8, 64), (1, 8)):
        numel, ranks, in_node = case
        made = make("sharded", numel, ranks, 16 << 20, in_node)
        ends = [0, *(stop for _, stop in made.segments)]
        assert [start for start, _ in made.segments] == ends[:-1], case
        assert ends[-1] == numel, case
        assert all(end % made.granule == 0 for end in ends[:-1]), case


def test_shares_cover_every_element_once() -> None:
    specs = ("topk:ratio=1/64,bits=2", "quantize:bits=8", "none", "randomk:ratio=1/64")
    for case in product(specs, (0, 1, 100, 4096, 100_003), (1, 2, 3, 7, 64)):
        spec, numel, parts = case
        cut = cost.owned(thinwire.compressor(spec), numel, torch.float32, parts)
        assert [start for start, _ in cut] == [0, *(stop for _, stop in cut[:-1])], case
        assert cut[-1][1] == numel, case
    # Pieces must be slices of the payload: 16 of 16 elements in 32 bits never pay, so a lone tail would be dense.
    compressor = thinwire.TopK(ratio="1/2", bits=16, chunk=16)
    for numel, parts in product(range(1, 200), (2, 3, 8)):
        cut = cost.owned(compressor, numel, torch.float32, parts)
        assert sum(compressor.nbytes(stop - start) for start, stop in cut) == compressor.nbytes(numel), (numel, parts)


def test_shares_differ_by_one_record_at_most() -> None:
    """Otherwise one rank would sum, compress and send more than the others."""
    for parts in (2, 3, 7, 64):
        for records in (1, parts - 1, parts, 2 * parts - 1, 100):
            counts = [(stop - start) // 16 for start, stop in cost.shares(16 * records, 16, parts)]
            assert sum(counts) == records
            assert max(counts) - min(counts) <= 1, (parts, records)


def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"1000": 1000, "256MiB": 256 << 20, "1GiB": 1 << 30, "2 kb": 2000, "3KiB": 3072, "7b": 7, "": 1 << 30}
    for text, expected in texts.items():
        monkeypatch.setenv("THINWIRE_MAX_BYTES", text)
        assert max_bytes(None) == expected, text
        assert max_bytes(77) == 77
    for given in (0, -1, 1.5, True, "1GiB"):
        with pytest.raises(ValueError, match=f"max_bytes {given!r}"):
            max_bytes(given)  # type: ignore[arg-type]
    for text in ("0", "-5", "lots", "1.5GiB", "1TiB"):
        monkeypatch.setenv("THINWIRE_MAX_BYTES", text)
        with pytest.raises(ValueError, match=f"THINWIRE_MAX_BYTES='{text}'"):
            max_bytes(None)


def chosen(spec: str, numel: int, ranks: int, *, can_shard: bool = True) -> tuple[str, str]:
    first = thinwire.compressor(spec)
    return choose("auto", first, first.for_sum(ranks), numel, torch.float32, ranks, can_shard=can_shard)


def test_auto_takes_the_one_that_sends_the_least() -> None:
    numel = 16 * 1024 * CHUNK
    for case in product(("topk:ratio=1/64,bits=2", "topk:ratio=1/256,bits=4", "quantize:bits=8"), WORLDS):
        spec, ranks = case
        first = thinwire.compressor(spec)
        sent = {
            "gather": cost.gather(first, numel, torch.float32, ranks).sent,
            "sharded": cost.sharded(first, first.for_sum(ranks), numel, torch.float32, ranks).sent,
            "dense": cost.dense(numel, torch.float32, ranks).sent,
        }
        name, reason = chosen(spec, numel, ranks)
        assert sent[name] == min(sent.values()), case
        assert all(f"{other} {round(nbytes):,}" in reason for other, nbytes in sent.items()), case


def test_auto_says_why() -> None:
    """Also if it does not take what would send less."""
    topk, one_record = "topk:ratio=1/64,bits=2", "not sharded, because there is one record, which one rank would own"
    for spec, numel, ranks, can_shard, name, reason in (
        (topk, 1 << 24, 64, True, "sharded", ""),
        (topk, 1 << 24, 64, False, "gather", "no state was given"),
        (f"{topk},chunk=none", 1 << 24, 64, True, "gather", one_record),
        ("none", 1000, 4, True, "dense", "the compressor is none"),
        (topk, 1, 4, True, "dense", "would not be smaller"),
        ("randomk:ratio=1/64", 1000, 4, True, "values", "same positions"),
        (topk, 10_000, 1, True, "gather", "one rank"),
    ):
        got = chosen(spec, numel, ranks, can_shard=can_shard)
        assert (got[0], reason in got[1]) == (name, True), (spec, numel, ranks, got)
    for ranks in (3, 4, 64):  # two records: some ranks own nothing then, and it sends less all the same
        assert chosen("quantize:bits=8", 4096, ranks)[0] != "sharded"
        assert chosen("quantize:bits=8", 4097, ranks)[0] == "sharded"


def test_what_cannot_be_done_is_refused() -> None:
    randomk = thinwire.RandomK(ratio="1/64")
    for name, compressor, words in (
        ("ring", TOPK, "algorithm 'ring', expected one of auto, gather"),
        ("values", TOPK, "whose ranks send different elements"),
        ("sharded", randomk, "use 'values'"),
    ):
        with pytest.raises(ValueError, match=words):
            choose(name, compressor, compressor, 10_000, torch.float32, 2, can_shard=True)


def test_a_sum_is_sent_on_with_more_entries_and_bits() -> None:
    assert thinwire.format_spec(TOPK.for_sum(2)) == "topk:ratio=1/32,bits=4,chunk=4096"
    assert thinwire.format_spec(TOPK.for_sum(1000)) == "topk:ratio=1/8,bits=4,chunk=4096"
    assert TOPK.for_sum(1000).kept(CHUNK) == 512
    assert thinwire.TopK(ratio="1/2").for_sum(4).ratio == 1
    assert thinwire.Quantize(bits=1).for_sum(4).bits == 4
    assert thinwire.NoCompression().for_sum(4) == thinwire.NoCompression()
