"""NaN and Inf: reported, sent as NaN so that every rank sees it, and forgotten by the next call."""

from itertools import product

import pytest
import torch

import thinwire
from support.cases import ALL_SPECS, DTYPES, SPECS
from support.oracle import bytes_of
from support.pairwise import pairwise
from thinwire import CompressedTensor
from thinwire.kernels.layout import residual_dtype

SIZES = (1, 70, 4097)
POISONS = (torch.nan, torch.inf, -torch.inf)


def clean(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(2)).to(dtype)


def check(compressor: thinwire.Compressor, tensor: torch.Tensor, residual: torch.Tensor | None, what: str) -> None:
    before = None if residual is None else bytes_of(residual)
    counted = compressor.stats.nonfinite
    ct = compressor.compress(tensor, residual, key=1)
    assert ct.finite is False, f"{what}: not reported"
    assert compressor.stats.nonfinite == counted + 1, f"{what}: not counted"
    assert residual is None or bytes_of(residual) == before, f"{what}: the residual was written"
    assert ct.nbytes == compressor.nbytes(tensor.numel(), tensor.dtype), f"{what}: another size"
    assert ct.decompress().isnan().any(), f"{what}: decodes without a NaN"
    total = torch.ones(tensor.numel(), dtype=tensor.dtype)
    assert compressor.accumulate(ct, total, 0.5).isnan().any(), f"{what}: NaN lost in the sum"
    assert not total.isinf().any(), f"{what}: Inf in the sum"
    read = CompressedTensor.from_bytes(ct.to_bytes())
    assert read.finite is False, f"{what}: not reported by the frame"
    assert read.to_bytes() == ct.to_bytes(), f"{what}: packs to other bytes"


@pytest.mark.parametrize("name", SPECS)
def test_reported_and_residual_untouched(name: str, backend: str) -> None:
    places = {"first": 0, "middle": 0.5, "last": 1, "in the residual": None}
    for spec, dtype, numel, value, place in pairwise(SPECS[name], DTYPES, SIZES, POISONS, places):
        tensor, residual, share = clean(numel, dtype), clean(numel, residual_dtype(dtype)), places[place]
        what = f"{spec}, {numel} x {dtype}, {value} {place}, {backend}"
        (residual if share is None else tensor)[-1 if share is None else int(share * (numel - 1))] = value
        check(thinwire.compressor(spec), tensor, residual, what)
        if share is not None:
            check(thinwire.compressor(spec), tensor, None, what + ", no residual")


def test_a_sum_that_overflows(backend: str) -> None:
    """Both finite, their sum not; float16 has a float32 residual, so there it cannot happen."""
    for spec, dtype, numel in pairwise(ALL_SPECS, (torch.float32, torch.float64, torch.bfloat16), (1, 4097)):
        compressor = thinwire.compressor(spec)
        tensor, residual = clean(numel, dtype), clean(numel, residual_dtype(dtype))
        tensor[-1], residual[-1] = torch.finfo(dtype).max, torch.finfo(residual.dtype).max
        check(compressor, tensor, residual, f"{spec}, {numel} x {dtype}, {backend}")


def test_the_next_call_works_again(backend: str) -> None:
    """As after a step that GradScaler skipped: the same bytes as if the bad call had never been."""
    for spec, numel in pairwise(ALL_SPECS, (0, 1, 4097)):
        compressor = thinwire.compressor(spec)
        bad, good = clean(numel, torch.float32), clean(numel, torch.float32)
        bad[numel // 3 : numel // 3 + 1] = torch.nan
        residual, untroubled = torch.ones(numel), torch.ones(numel)
        buffer = torch.empty(compressor.nbytes(numel), dtype=torch.uint8)
        assert compressor.compress(bad, residual, key=1, out=buffer).finite is (numel == 0)
        ct = compressor.compress(good, residual, key=1, out=buffer)
        expected = compressor.compress(good, untroubled, key=1)
        assert ct.finite
        assert ct.to_bytes() == expected.to_bytes(), f"{spec}, {numel}: other bytes after a NaN, {backend}"
        assert bytes_of(residual) == bytes_of(untroubled), f"{spec}, {numel}: another residual after a NaN, {backend}"


def test_a_sum_beyond_float16_is_sent_as_a_finite_number(backend: str) -> None:
    """A float16 gradient near its end and a float32 residual: finite to the sender, so it must be to the receiver."""
    for spec, numel in product(ALL_SPECS, (1, 4096)):
        tensor, residual = torch.full((numel,), 65504.0, dtype=torch.float16), torch.full((numel,), 900.0)
        ct = thinwire.compressor(spec).compress(tensor, residual, key=1)
        assert ct.finite
        assert ct.decompress().isfinite().all(), f"{spec}, {numel}: decodes to Inf, {backend}"
