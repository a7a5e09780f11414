"""A memory budget: work is cut into segments that fit it, with the same results, or it says how much it needs."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import thinwire
from benchmarks.clock import peak_memory
from support.by_threads import by_threads
from support.group import run_group
from support.oracle import same_bits
from support.reductions import Case, Outcome, perform
from support.run import Run
from support.slow import slow
from support.training import assert_same, raises, weight_bits
from thinwire import Collective
from thinwire.collectives import LocalGroup
from thinwire.testing import RankPool

NUMEL = 300_001
BUDGET = 16 << 20
SLACK = 1 << 19
"""Stacks of threads, gloo's own buffers, small things that malloc holds."""
CASES = [
    Case(spec, algorithm, (NUMEL,), dtype)
    for spec, algorithm in (
        ("topk:ratio=1/64,bits=2", "gather"), ("topk:ratio=1/64,bits=2", "sharded"), ("quantize:bits=4", "gather"),
        ("quantize:bits=4", "sharded"), ("topk:ratio=1/64,bits=2", "dense"), ("none", "auto"),
    )
    for dtype in (torch.float32, torch.bfloat16)
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "nodes"), [(2, 0), (3, 0), slow(8, 0), (4, 2)])
def test_segments_change_no_bit(ranks: RankPool, world_size: int, nodes: int) -> None:
    """Without a budget, and with a fifth of what one segment takes."""

    def run(cases: list[Case]) -> list[tuple[Outcome, ...]]:
        found = ranks.run(perform, world_size, cases, nodes) if nodes else run_group(perform, world_size, cases)
        return list(zip(*found, strict=True))

    cases = CASES if world_size == 3 else CASES[:9:2] if nodes else CASES[:5:2]
    in_one = run(cases)
    budgets = [4 * outcomes[0].reports[0].memory // 5 for outcomes in in_one]
    in_parts = run([replace(case, max_bytes=budget) for case, budget in zip(cases, budgets, strict=True)])
    for case, budget, *outcomes in zip(cases, budgets, in_one, in_parts, strict=True):
        for whole, parts in zip(*outcomes, strict=True):
            assert all(map(same_bits, whole.results, parts.results)), case
            assert all(map(same_bits, whole.results, outcomes[0][0].results)), case
            assert nodes or same_bits(whole.residual, parts.residual), case
            assert all(report.memory <= budget // 4 for report in parts.reports), case
            segments = [each.reports[0].segments for each in (whole, parts, outcomes[1][0])]
            assert segments[0] == 1 < segments[1] == segments[2], case
        for kept in ("residual", "owned"):  # of all ranks: in nodes they keep other parts of it
            assert same_bits(*(sum(getattr(each, kept) for each in found) for found in outcomes)), f"{kept}, {case}"
        bounds = 8 * world_size * (world_size - 1)  # each rank first sends the others its largest number, or NaN
        sent = [sum(outcome.reports[0].bytes_sent for outcome in found) for found in outcomes]
        assert nodes or sent[1] == sent[0] + bounds, case


@by_threads(2)
def test_a_budget_that_is_too_small_says_what_is_needed(group: LocalGroup) -> None:
    """That much is enough, one element less is not."""

    def call(algorithm: str, max_bytes: int) -> Any:
        tensor, spec = torch.ones(NUMEL), "quantize:bits=8,block=32"
        return thinwire.all_reduce_compressed(tensor, spec, algorithm=algorithm, max_bytes=max_bytes, group=group)

    for algorithm in ("gather", "sharded", "dense"):
        with pytest.raises(ValueError, match="max_bytes") as caught:
            call(algorithm, 8)
        needed = int(re.search(r" to ([\d,]+)", str(caught.value))[1].replace(",", ""))  # type: ignore[index]
        assert call(algorithm, needed).report.segments > 1
        with pytest.raises(ValueError, match="max_bytes"):
            call(algorithm, needed - 4)
    with pytest.raises(ValueError, match="max_bytes -1"):
        call("gather", -1)


def measure(rank: int, world_size: int, cases: list[tuple[str, str]]) -> list[int | None]:
    peaks = []
    for spec, algorithm in cases:
        thinwire.all_reduce_compressed(torch.ones(100_000), spec, algorithm=algorithm)  # which may compile the kernels
        tensor, residual, state = torch.ones(4_000_000), torch.zeros(4_000_000), thinwire.ShardState()

        def job(spec: str = spec, algorithm: str = algorithm, given: Any = (tensor, residual, state)) -> None:
            tensor, residual, state = given
            work = thinwire.all_reduce_compressed(
                tensor, spec, residual, algorithm=algorithm, state=state, max_bytes=BUDGET
            )
            assert work.report.memory <= BUDGET // 4

        peaks.append(peak_memory(job, torch.device("cpu")))
    return peaks


def test_the_measured_memory_is_within_the_budget(ranks: RankPool) -> None:
    """One operation may take a quarter, since four may be under way; dense would take 48 MB, or twelve times that."""
    cases = [
        ("quantize:bits=8", "gather"), ("quantize:bits=8", "sharded"), ("topk:ratio=1/4,bits=32", "gather"),
        ("topk:ratio=1/64,bits=2", "sharded"), ("none", "dense"),
    ]  # fmt: skip
    for rank, peaks in enumerate(ranks.run(measure, 4, cases, timeout=100)):
        for case, peak in zip(cases, peaks, strict=True):
            assert peak is None or peak <= BUDGET // 4 + SLACK, f"rank {rank}, {case}: {peak:,} bytes"


def train_within(rank: int, world_size: int, kind: str, ddp: bool, compressor: Any) -> None:
    """One byte is too little: an error on every rank, in the first step, by either setting. A megabyte is enough."""
    ends = []
    for text, argument in (("1", None), ("", 1), ("", None), ("1MiB", None), ("", 1 << 20)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("THINWIRE_MAX_BYTES", text)
            run = Run(rank, kind, ddp=ddp, compressor=compressor, collective=Collective(max_bytes=argument))
            start = weight_bits(run.model)
            if text != "1" and argument != 1:
                run.train(0, 3)
                ends.append(weight_bits(run.model))
                continue
            with raises(ValueError, "max_bytes 1", "raise max_bytes or THINWIRE_MAX_BYTES"):
                run.train(0, 1)
            assert_same(start, weight_bits(run.model), "weights")
    assert start != ends[0]
    for end in ends[1:]:
        assert_same(end, ends[0], "weights with more memory and less")


@pytest.mark.parametrize(
    ("kind", "ddp", "compressor"),
    [
        ("AdamW", True, None), ("AdamW", False, "none"), ("SGD", True, "none"), ("SGD", False, None),
        ("attach", True, None), ("attach", False, None),
    ],
)  # fmt: skip
def test_training_within_a_budget(ranks: RankPool, kind: str, ddp: bool, compressor: str | None) -> None:
    """All payloads of a step are held until it ends."""
    ranks.run(train_within, 2, kind, ddp, compressor, timeout=30)
