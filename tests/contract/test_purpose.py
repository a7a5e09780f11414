"""What compressors are for: few bytes, and descent that reaches the optimum, since nothing is lost for good."""

from math import lgamma, log

import pytest
import torch

import thinwire
from support.cases import DTYPES, SPECS
from support.pairwise import pairwise
from thinwire import kernels
from thinwire.compressors import frame
from thinwire.kernels.layout import TopKLayout


def entropy_bits(n: int, k: int) -> float:
    """log2 C(n, k) / k: what no code of k positions out of n can beat."""
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2) / k


def test_positions_are_near_their_entropy() -> None:
    columns = ((1, 2, 4, 8, 16, 32), ("1/256", "1%", "1/64", "1/16"), (4096, None), (1_000_000, 25_000_000))
    for bits, ratio, chunk, numel in pairwise(*columns):
        layout = thinwire.TopK(ratio, chunk=chunk, bits=bits).layout(numel, torch.float32)
        assert isinstance(layout, TopKLayout)
        full = [(layout.record, layout.rows)]
        everything = [*full, (layout.tail, 1)] if layout.tail else full
        for part in (full, everything):  # a short last record alone has the rounding to whole bytes against it
            elements, kept = (sum(count * getattr(record, of) for record, count in part) for of in ("n", "k"))
            spent = sum(8 * count * (record.nbytes - record.low_at) for record, count in part) / kept
            bound = entropy_bits(elements, kept)
            assert spent <= 1.13 * bound, f"{part}: {spent:.2f} bits for a position, the entropy is {bound:.2f}"
        alone = entropy_bits(layout.record.n, layout.record.k)
        spent = 8 * (layout.record.nbytes - layout.record.low_at) / layout.record.k
        assert spent <= 1.13 * alone, f"{layout}: against one chunk's own"


def test_the_headline_ratio() -> None:
    """25 million float32 with topk:ratio=1/64,bits=2: at least 195x smaller, header and checksum counted."""
    compressor, numel = thinwire.compressor("topk:ratio=1/64,bits=2"), 25_000_000
    assert frame.HEADER_BYTES == 36
    overhead = frame.HEADER_BYTES + len(thinwire.format_spec(compressor))
    assert 4 * numel / (compressor.nbytes(numel) + overhead) >= 195


def test_quantize_costs_its_bits_and_the_scales_and_randomk_sends_no_positions() -> None:
    for bits in (1, 2, 4, 8):
        assert thinwire.Quantize(bits).nbytes(1 << 20) == (1 << 20) * bits // 8 + 2 * (1 << 20) // 256
    for dtype in DTYPES:
        assert thinwire.RandomK("1/64").nbytes(1 << 20, dtype) == (1 << 14) * dtype.itemsize


@pytest.mark.parametrize("name", SPECS)
def test_a_quadratic_bowl_converges_with_error_feedback(name: str) -> None:
    """Of each compressor the first spec with the reference too, many times slower.

    The longer an element waits for its turn, the smaller the steps must be, and the more of them.
    """
    generator = torch.Generator().manual_seed(3)
    curvature = torch.linspace(0.5, 1, 768)[torch.randperm(768, generator=generator)]
    optimum = torch.randn(768, generator=generator)
    for backend, spec in [("reference", SPECS[name][0]), *(("cpu", spec) for spec in SPECS[name])]:
        compressor = thinwire.compressor(spec)
        wait = float(1 / getattr(compressor, "ratio", 1))
        rate = min(0.05, 0.3 / wait if compressor.name == "randomk" else 0.3 / wait**0.75)
        x, residual = torch.zeros(768), torch.zeros(768)
        with kernels.force(backend):
            for step in range(int((16 if wait == 1 else 8) / rate)):
                sent = compressor.compress(curvature * (x - optimum), residual, key=step)
                compressor.accumulate(sent, x, -rate)
        distance = float((x - optimum).norm() / optimum.norm())
        assert distance < 0.02, f"{spec}, {backend}: still {distance:.3f} of the way off after {step + 1} steps"
