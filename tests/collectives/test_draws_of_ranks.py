"""Random draws of an all-reduce: those of ranks, segments and stages are independent, so that sums are unbiased."""

import torch
import torch.distributed as dist

import thinwire
from thinwire.collectives import LocalGroup
from thinwire.testing import run_threads

STOCHASTIC = "quantize:bits=2,rounding=stochastic"
NUMEL = 8192


def error_of_average(group: LocalGroup) -> float:
    """All ranks have the same tensor, so that the average errs by the rounding alone."""
    given = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    found = given.clone()
    thinwire.all_reduce_compressed(found, STOCHASTIC, op=dist.ReduceOp.AVG, group=group, algorithm="gather")
    return float((found - given).norm() / given.norm())


def test_the_error_of_an_average_falls_with_the_number_of_ranks() -> None:
    alone, together = run_threads(error_of_average, 1)[0], run_threads(error_of_average, 9)[0]
    assert alone > 0.5
    assert 0.25 < together / alone < 0.42, "independent errors of 9 ranks average to a third"


def in_segments(group: LocalGroup) -> float:
    """The share of elements that are rounded alike in two segments with the same numbers."""
    part = torch.rand(1 << 16, generator=torch.Generator().manual_seed(1))
    part[::256] = 1.0  # blocks of equal scales
    tensor = torch.cat([part, part])
    handle = thinwire.all_reduce_compressed(tensor, STOCHASTIC, group=group, algorithm="gather", max_bytes=1 << 18)
    length = len(tensor) // handle.report.segments
    assert handle.report.segments in (2, 4, 8), "segments must begin alike"
    first, second = tensor[:length], tensor[len(part) : len(part) + length]
    return float((first == second).double().mean())


def test_segments_draw_on_their_own() -> None:
    for share in run_threads(in_segments, 2):
        assert share < 0.8


def twice_rounded(group: LocalGroup) -> float:
    """The mean of 0.4, rounded to sevenths and, by its owner, to 0 or 1: with the same draws it is 3/7."""
    tensor = torch.full((1 << 16,), 0.4)
    tensor[::256] = 1.0
    handle = thinwire.all_reduce_compressed(
        tensor, "quantize:bits=4,rounding=stochastic", group=group, algorithm="sharded", shard_compressor=STOCHASTIC
    )
    assert handle.report.algorithm == "sharded"
    return float(tensor.view(-1, 256)[:, 1:].double().mean())


def test_the_second_compression_draws_on_its_own() -> None:
    """The mean of 65,000 has a standard deviation of 0.002."""
    (mean,) = run_threads(twice_rounded, 1)
    assert abs(mean - 0.4) < 0.01
