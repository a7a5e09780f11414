"""What comes out: the sum of what the ranks sent, with the same bits on every rank, by as many bytes as are counted."""

import pytest
import torch
import torch.distributed as dist

import thinwire
from support.by_threads import by_threads
from support.group import run_group
from support.oracle import same_bits
from support.reductions import Case, check_expected, expected, perform, shares
from support.slow import slow
from thinwire.collectives import LocalGroup
from thinwire.testing import RankPool

WORLDS = (1, 3, 8)
"""Ranks as threads; and once as processes."""
TOPK, QUANTIZE, RANDOMK = "topk:ratio=1/64,bits=2", "quantize:bits=4", "randomk:ratio=1/64,seed=5"
LARGE = (3, 5, 1400)
LARGEST = float(torch.tensor(0.9 * torch.finfo(torch.float16).max, dtype=torch.float16))

EXACT = [
    *(Case(TOPK, algorithm, average=average) for algorithm in ("gather", "sharded") for average in (False, True)),
    *(Case(QUANTIZE, algorithm, average=average) for algorithm in ("gather", "sharded") for average in (False, True)),
    *(Case(spec, "gather") for spec in ("topk:ratio=1/64,bits=32,chunk=none", "quantize:bits=1", RANDOMK)),
    Case("topk:ratio=1/4,bits=32,chunk=16", "sharded", LARGE, second="quantize:bits=8,block=32"),
    Case("topk:ratio=1/4,bits=32,chunk=16", "gather", LARGE, residual=False),
    Case("quantize:bits=2", "gather", residual=False),
    Case("quantize:bits=8,block=32", "sharded", LARGE, residual=False),
    *(Case(TOPK, algorithm, (0,)) for algorithm in ("gather", "sharded")),
    *(Case(TOPK, algorithm, shape) for algorithm in ("gather", "sharded") for shape in ((1,), ())),
    # A share that is one short record, which by itself would be sent dense.
    *(Case(spec, "sharded", (2 * 4096 + 1,)) for spec in ("topk:ratio=1/64,bits=32", "quantize:bits=8")),
    *(Case(TOPK, algorithm, (4096, 3), torch.float64) for algorithm in ("gather", "sharded")),
    *(Case(TOPK, "gather", (4097,), dtype) for dtype in (torch.float16, torch.bfloat16)),
]
SUMMED = [
    *(Case(TOPK, "dense", shape) for shape in ((9001,), (0,), (1,))),
    Case("none", "dense", LARGE),
    *(Case(RANDOMK, "values", shape) for shape in ((9001,), (0,), (1,))),
    Case(RANDOMK, "values", dtype=torch.float64, residual=False),
    Case("none", "auto", dtype=torch.float64),
]
ROUNDED = [
    Case(spec, algorithm, dtype=dtype, average=average)
    for dtype in (torch.float16, torch.bfloat16)
    for average in (False, True)
    for spec, algorithm in ((TOPK, "sharded"), (TOPK, "dense"), (QUANTIZE, "sharded"), (RANDOMK, "values"))
] + [
    # A last share of 2 elements of 16 bits is as long dense as in 8 bits, and must not be taken for one that is not.
    Case(spec, "sharded", (4096 + tail,), torch.bfloat16)
    for spec in ("quantize:bits=8", "topk:ratio=1/16,bits=2")
    for tail in (1, 2, 3, 4095)
]


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_result_is_the_sum_of_what_ranks_sent(world_size: int) -> None:
    """The same sums and residuals as in one process, to the last bit; plain sums are added in the order of ranks."""
    cases = EXACT + SUMMED
    found = run_group(perform, world_size, cases)
    for index, case in enumerate(cases):
        check_expected(found, case, index)


def test_processes_have_the_bits_of_threads(ranks: RankPool) -> None:
    cases = EXACT + SUMMED + ROUNDED
    for one, other in zip(ranks.run(perform, 3, cases), run_group(perform, 3, cases), strict=True):
        for case, mine, theirs in zip(cases, one, other, strict=True):
            assert all(map(same_bits, mine.results, theirs.results)), case
            assert [report.bytes_sent for report in mine.reports] == [report.bytes_sent for report in theirs.reports]


@pytest.mark.parametrize("world_size", WORLDS)
def test_sixteen_bits_are_the_same_everywhere_and_near_the_sum(world_size: int) -> None:
    """What owners send on in 16 bits is rounded once more; more than rounding may not separate it from the sum."""
    found = run_group(perform, world_size, ROUNDED)
    for index, case in enumerate(ROUNDED):
        results = [outcomes[index].results for outcomes in found]
        assert all(all(map(same_bits, mine, results[0])) for mine in results), case
        right = expected(case, world_size)[0].results[0]
        close = 4 * torch.finfo(case.dtype).eps * float(right.abs().max())
        torch.testing.assert_close(results[0][0], right, rtol=0, atol=close, msg=lambda m, c=case: f"{c}\n{m}")


@by_threads(3)
def test_an_average_of_large_float16_is_finite(group: LocalGroup) -> None:
    """Averages of numbers near the end of the dtype's range, whose sum is beyond it."""
    for spec in ("none", TOPK):
        tensor = torch.full((9001,), LARGEST, dtype=torch.float16)
        work = thinwire.all_reduce_compressed(tensor, spec, op=dist.ReduceOp.AVG, algorithm="dense", group=group)
        assert work.report.finite
        assert tensor.unique().tolist() == [LARGEST], spec


COUNTED = [
    Case(spec, algorithm, (200_003,), dtype, steps=[0])
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
def test_the_report_has_the_bytes_of_the_formula(world_size: int) -> None:
    for rank, outcomes in enumerate(run_group(perform, world_size, COUNTED)):
        for case, outcome in zip(COUNTED, outcomes, strict=True):
            (report,), where = outcome.reports, f"rank {rank}, {case}"
            others = [other for other in range(world_size) if other != rank]
            assert (report.algorithm, report.segments) == (case.algorithm, 1), where
            assert report.bytes_sent == sum(sent(case, rank, other, world_size) for other in others), where
            assert report.bytes_received == sum(sent(case, other, rank, world_size) for other in others), where
            assert report.messages == len(others) * (1 if case.algorithm == "gather" else 2), where
