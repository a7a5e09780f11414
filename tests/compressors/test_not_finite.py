"""NaN and Inf: reported, sent as NaN so that every rank sees it, and forgotten by the next call."""

import pytest
import torch

import thinwire
from support.cases import ALL_SPECS, DTYPES, WITH_RESIDUAL
from support.oracle import bytes_of
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


@pytest.mark.parametrize("spec", WITH_RESIDUAL)
def test_reported_and_residual_untouched(spec: str, backend: str) -> None:
    compressor = thinwire.compressor(spec)
    for dtype in DTYPES:
        for numel in SIZES:
            residual = clean(numel, residual_dtype(dtype))
            for index, at in enumerate(sorted({0, numel // 2, numel - 1})):
                poison = POISONS[index % 3] if numel > 100 else None
                for value in POISONS if poison is None else (poison,):
                    tensor = clean(numel, dtype)
                    tensor[at] = value
                    what = f"{spec}, {numel} x {dtype}, {value} at {at}, {backend}"
                    check(compressor, tensor, residual, what)
                    check(compressor, tensor, None, what + ", no residual")
            poisoned = residual.clone()
            poisoned[-1] = torch.nan
            check(
                compressor, clean(numel, dtype), poisoned, f"{spec}, {numel} x {dtype}, NaN in the residual, {backend}"
            )


@pytest.mark.parametrize("spec", WITH_RESIDUAL)
def test_a_sum_that_overflows(spec: str, backend: str) -> None:
    """Both finite, their sum not; float16 has a float32 residual, so there it cannot happen."""
    compressor = thinwire.compressor(spec)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for numel in (1, 4097):
            tensor, residual = clean(numel, dtype), clean(numel, residual_dtype(dtype))
            tensor[-1], residual[-1] = torch.finfo(dtype).max, torch.finfo(residual.dtype).max
            check(compressor, tensor, residual, f"{spec}, {numel} x {dtype}, {backend}")
            tensor[-1] = residual[-1] = 0
            assert compressor.compress(tensor, residual, key=1).finite


@pytest.mark.parametrize("spec", WITH_RESIDUAL)
def test_the_next_call_works_again(spec: str, backend: str) -> None:
    """As after a step that GradScaler skipped: the same bytes as if the bad call had never been."""
    compressor = thinwire.compressor(spec)
    for numel in (1, 4097):
        bad, good = clean(numel, torch.float32), clean(numel, torch.float32)
        bad[numel // 3] = torch.nan
        residual, untroubled = torch.ones(numel), torch.ones(numel)
        buffer = torch.empty(compressor.nbytes(numel), dtype=torch.uint8)
        assert not compressor.compress(bad, residual, key=1, out=buffer).finite
        ct = compressor.compress(good, residual, key=1, out=buffer)
        expected = compressor.compress(good, untroubled, key=1)
        assert ct.finite
        assert ct.to_bytes() == expected.to_bytes(), f"{spec}, {numel}: other bytes after a NaN, {backend}"
        assert bytes_of(residual) == bytes_of(untroubled), f"{spec}, {numel}: another residual after a NaN, {backend}"


def test_an_empty_tensor_is_finite(backend: str) -> None:
    for spec in ALL_SPECS:
        assert thinwire.compressor(spec).compress(torch.empty(0), key=1).finite


def test_a_sum_beyond_float16_is_sent_as_a_finite_number(backend: str) -> None:
    """A float16 gradient near its end and a float32 residual: finite to the sender, so it must be to the receiver."""
    for spec in WITH_RESIDUAL:
        compressor = thinwire.compressor(spec)
        for numel in (1, 4096):
            tensor, residual = torch.full((numel,), 65504.0, dtype=torch.float16), torch.full((numel,), 900.0)
            ct = compressor.compress(tensor, residual, key=1)
            assert ct.finite
            assert ct.decompress().isfinite().all(), f"{spec}, {numel}: decodes to Inf, {backend}"


def test_the_residual_of_drawn_bits_stays_small(backend: str) -> None:
    """Error feedback around stochastic rounding: not what it is for, but it must not run away."""
    for bits in (4, 8):
        compressor, residual = thinwire.Quantize(bits, rounding="stochastic"), torch.zeros(4096)
        for step in range(60):
            compressor.compress(torch.randn(4096, generator=torch.Generator().manual_seed(step)), residual, key=step)
        assert residual.abs().max() < 1000, f"{bits} bits: residual of {residual.abs().max():.3g} after 60 steps"


@pytest.mark.parametrize("bits", [1, 2])
def test_few_drawn_bits_refuse_a_residual(bits: int) -> None:
    """With one bit it would double about every step; with two it grows to many times the gradient."""
    compressor = thinwire.Quantize(bits, rounding="stochastic")
    with pytest.raises(ValueError, match="with a residual, which would grow without bound"):
        compressor.compress(torch.ones(4096), torch.zeros(4096), key=1)
