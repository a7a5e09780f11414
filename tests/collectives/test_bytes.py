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


def sent(case: Case, sender: int, receiver: int, world_size: int) -> int:
    """The docstring of each algorithm in numbers, from `nbytes` alone."""
    if case.algorithm == "gather":
        return case.compressor.nbytes(case.shape[0], case.dtype)
    sizes = [stop - start for start, stop in shares(case, world_size)]
    piece = case.compressor.nbytes(sizes[receiver], case.dtype)
    return piece + case.second_of(world_size).nbytes(sizes[sender], torch.float32)


@pytest.mark.parametrize("world_size", [2, slow(8)])
def test_the_report_has_the_bytes_of_the_formula(ranks: RankPool, world_size: int) -> None:
    found = ranks.run(perform, world_size, CASES)
    for rank, outcomes in enumerate(found):
        for case, outcome in zip(CASES, outcomes, strict=True):
            (report,), where = outcome.reports, f"rank {rank}, {case}"
            others = [other for other in range(world_size) if other != rank]
            assert (report.algorithm, report.segments) == (case.algorithm, 1), where
            assert report.bytes_sent == sum(sent(case, rank, other, world_size) for other in others), where
            assert report.bytes_received == sum(sent(case, other, rank, world_size) for other in others), where
            assert report.messages == len(others) * (1 if case.algorithm == "gather" else 2), where
