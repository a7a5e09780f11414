"""Bytes: the report says what each algorithm's formula says, and "auto" takes the smallest."""

from typing import Any

import pytest
import torch

import thinwire
from support.reductions import Case, perform, shares
from support.slow import slow
from thinwire.testing import RankPool

WORLDS = (2, 4, slow(8))
CASES = [
    Case(spec, algorithm, (200_003,), dtype, steps=1)
    for spec in ("topk:ratio=1/64,bits=2", "quantize:bits=4")
    for algorithm in ("gather", "sharded")
    for dtype in (torch.float32, torch.bfloat16)
]


def sent_by(case: Case, rank: int, world_size: int) -> int:
    """The docstring of each algorithm in numbers, from `nbytes` alone."""
    (numel,) = case.shape
    if case.algorithm == "gather":
        return (world_size - 1) * case.compressor.nbytes(numel, case.dtype)
    sizes = [stop - start for start, stop in shares(case, world_size)]
    pieces = [case.compressor.nbytes(size, case.dtype) for size in sizes]
    mine = case.second_of(world_size).nbytes(sizes[rank], torch.float32)
    return sum(pieces) - pieces[rank] + (world_size - 1) * mine


def received_by(case: Case, rank: int, world_size: int) -> int:
    (numel,) = case.shape
    if case.algorithm == "gather":
        return (world_size - 1) * case.compressor.nbytes(numel, case.dtype)
    sizes = [stop - start for start, stop in shares(case, world_size)]
    sums = [case.second_of(world_size).nbytes(size, torch.float32) for size in sizes]
    return (world_size - 1) * case.compressor.nbytes(sizes[rank], case.dtype) + sum(sums) - sums[rank]


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_report_has_the_bytes_of_the_formula(ranks: RankPool, world_size: int) -> None:
    found = ranks.run(perform, world_size, CASES)
    for rank, outcomes in enumerate(found):
        for case, outcome in zip(CASES, outcomes, strict=True):
            (report,) = outcome.reports
            assert report.algorithm == case.algorithm
            assert report.bytes_sent == sent_by(case, rank, world_size), f"rank {rank}, {case}"
            assert report.bytes_received == received_by(case, rank, world_size), f"rank {rank}, {case}"
            messages = (world_size - 1) * (1 if case.algorithm == "gather" else 2)
            assert report.messages == messages, f"rank {rank}, {case}"
            assert report.segments == 1


def choose(rank: int, world_size: int, specs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Every algorithm's report, and that of auto, by name."""
    found = []
    for spec, algorithms in specs:
        reports = {}
        for algorithm in ("auto", *algorithms.split()):
            tensor, residual = torch.ones(200_003), torch.zeros(200_003)
            work = thinwire.all_reduce_compressed(
                tensor, spec, residual, algorithm=algorithm, state=thinwire.ShardState()
            )
            reports[algorithm] = work.report
        found.append(reports)
    return found


@pytest.mark.parametrize("world_size", WORLDS)
def test_auto_sends_least_and_says_why(ranks: RankPool, world_size: int) -> None:
    every = "gather sharded dense"
    specs = [
        ("topk:ratio=1/64,bits=2", every), ("topk:ratio=1/4,bits=32", every), ("quantize:bits=8", every),
        ("quantize:bits=1", every), ("topk:ratio=1/64,bits=2,chunk=none", "gather dense"),
        ("randomk:ratio=1/64", "gather dense values"), ("none", "gather dense"),
    ]  # fmt: skip
    found = ranks.run(choose, world_size, specs)
    for index, (spec, _) in enumerate(specs):
        reports = [answers[index] for answers in found]
        mean = {name: sum(report[name].bytes_sent for report in reports) / world_size for name in reports[0]}
        best = min(nbytes for name, nbytes in mean.items() if name != "auto")
        assert mean["auto"] == best, f"{spec}: {mean}"
        assert len({report["auto"].algorithm for report in reports}) == 1
        for report in reports:
            assert report["auto"].reason.strip(), spec
            assert report["auto"].algorithm in mean
