"""Many threads, the same bytes: the work is shared in a way that no result depends on."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

import thinwire
from support.cases import ALL_SPECS, KEY, has_kernel, make_input
from support.oracle import bytes_of
from support.pairwise import pairwise
from thinwire import kernels

NUMEL = 300_007
"""More than four times what the kernels hold worth a thread of its own."""
SPECS = [spec for spec in ALL_SPECS if has_kernel(thinwire.compressor(spec).layout(NUMEL, torch.float32))]


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(spec: str, dtype: torch.dtype, kind: str) -> tuple[bytes, bytes, bytes]:
    compressor = thinwire.compressor(spec)
    tensor, residual = make_input(kind, NUMEL, dtype)
    ct = compressor.compress(tensor, residual, key=KEY)
    total = compressor.accumulate(ct, torch.ones(NUMEL, dtype=dtype), 0.5)
    return bytes_of(ct.payload), bytes_of(residual), bytes_of(total)


@pytest.mark.usefixtures("_threads")
def test_the_number_of_threads_changes_nothing() -> None:
    """Three of them, even on a machine with fewer cores."""
    for spec, (dtype, kind) in pairwise(SPECS, ((torch.float32, "normal"), (torch.bfloat16, "ties"))):
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with kernels.force("cpu"):
                results.append(run(spec, dtype, kind))
        assert results[0] == results[1] == results[2], f"{spec}, {dtype}, {kind}: other bytes with other threads"


@pytest.mark.usefixtures("_threads")
def test_a_nan_in_any_thread_s_share_is_seen() -> None:
    torch.set_num_threads(3)
    for spec, at in pairwise(SPECS, (0, NUMEL // 2, NUMEL - 1)):
        tensor, residual = make_input("normal", NUMEL, torch.float32)
        tensor[at], before = torch.nan, bytes_of(residual)
        with kernels.force("cpu"):
            ct = thinwire.compressor(spec).compress(tensor, residual, key=KEY)
        assert not ct.finite, f"{spec}: NaN at {at} not seen"
        assert bytes_of(residual) == before, f"{spec}: NaN at {at}, residual written"


def test_callers_at_the_same_time(backend: str) -> None:
    """As overlapping buckets do: calls from several threads neither wait for ever nor mix their data."""
    specs, kinds = ("topk:ratio=1/64,bits=2", "quantize:bits=8"), ("normal", "ties", "one-hot", "denormals")
    calls = list(product(specs, [torch.float32], kinds))
    alone = [run(*call) for call in calls]
    with ThreadPoolExecutor(len(kinds)) as pool:
        futures = [pool.submit(run, *call) for call in calls * 3]
        together = [future.result(timeout=120) for future in futures]
    assert together == alone * 3
