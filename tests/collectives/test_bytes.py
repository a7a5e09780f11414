"""Bytes: the report says what each algorithm's formula says."""

import pytest
import torch

from support.reductions import Case, perform, shares
from support.slow import slow
from thinwire.testing import RankPool

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


@pytest.mark.parametrize("world_size", [2, slow(8)])
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
