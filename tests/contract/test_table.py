"""The contract, for every registered compressor x size x dtype x input x backend; failures name the row."""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, product

import numpy as np
import pytest
import torch

import thinwire
from support.cases import BACKENDS, DTYPES, KEY, SPECS, Case, has_kernel, rows, sends_exactly
from support.memory import guarded
from support.oracle import Record, bytes_of, read_quantize, read_topk, same_bits, topk_positions
from thinwire import CompressedTensor, kernels
from thinwire.compressors import frame
from thinwire.kernels.layout import DenseLayout, QuantizeLayout, TopKLayout, residual_dtype

PAIRS = [pytest.param((name, backend), id=f"{name}-{backend}") for name in SPECS for backend in BACKENDS]


@lru_cache(maxsize=1)
def reference_rows(name: str) -> list[Case]:
    """Every row of one compressor by the reference; its own tests come right before those that compare with it."""
    with kernels.force("reference"):
        return list(rows(name, "reference"))


@pytest.fixture(scope="module", params=PAIRS)
def table(request: pytest.FixtureRequest) -> Iterator[list[Case]]:
    """Every row of one compressor on one backend, compressed once for all tests of this file."""
    name, backend = request.param
    with kernels.force(backend):
        yield reference_rows(name) if backend == "reference" else list(rows(name, backend))


@pytest.fixture
def ran(request: pytest.FixtureRequest, table: list[Case]) -> str:
    """The backend that must have run."""
    return request.node.callspec.params["table"][1]


def beyond_float32(case: Case) -> bool:
    """Values too large or too small for the wire, which is float32 at best: the residual has them."""
    return case.kind in ("huge", "denormals") and case.tensor.dtype == torch.float64


def test_every_registered_compressor_is_in_the_table() -> None:
    lacking = set(thinwire.registered()) - set(SPECS)
    assert not lacking, f"compressors without specs: {sorted(lacking)}; add them to SPECS in tests/support/cases.py"
    for name, specs in SPECS.items():
        assert {thinwire.compressor(spec).name for spec in specs} == {name}


def test_sent_plus_kept_is_what_came_in(table: list[Case]) -> None:
    """The residual is what came in less what was sent, with no more than the rounding of that subtraction."""
    for case in table:
        if case.after is None:
            continue
        assert torch.equal(case.after, case.came_in - case.sent), f"{case}: kept is not came in - sent"
        if sends_exactly(case.compressor, case.tensor.dtype):
            assert torch.equal(case.sent + case.after, case.came_in), f"{case}: sent + kept is not what came in"


def test_nothing_is_sent_that_was_not_there(table: list[Case]) -> None:
    """Compression contracts: less is kept than came in. Otherwise error feedback would diverge."""
    for case in table:
        if case.after is None or beyond_float32(case):
            continue
        size = case.came_in.abs().amax().to(torch.float64) if len(case.came_in) else 1.0
        kept, came = ((x.to(torch.float64) / size).square().sum() for x in (case.after, case.came_in))
        limit = 1.0
        if isinstance(case.compressor, thinwire.TopK) and case.compressor.bits == 32:
            limit = 1 - float(case.compressor.ratio)
        assert size == 0 or kept <= came * limit + 1e-6, f"{case}: kept {kept:.4g} of {came:.4g}"


def test_quantisation_error_is_below_one_step(table: list[Case]) -> None:
    """Even levels: half a step to the nearest, and 2**-7 of the largest for a scale cut to bfloat16."""
    for case in table:
        layout = case.ct.layout
        if case.after is None or not isinstance(layout, QuantizeLayout) or layout.bits <= 2:
            continue
        if case.kind == "denormals" or beyond_float32(case):
            continue  # below the smallest scale, or above the largest
        share = 0.5 / ((1 << layout.bits - 1) - 1) + 2**-7
        for values, error in zip(case.came_in.split(layout.block), case.after.split(layout.block), strict=True):
            worst, allowed = error.abs().amax(), values.abs().amax() * share
            assert worst <= allowed, f"{case}: off by {worst:.4g}, expected {allowed:.4g}"


def test_size_frame_finiteness_and_kernels(table: list[Case], ran: str) -> None:
    for case in table:
        ct, numel, dtype = case.ct, case.tensor.numel(), case.tensor.dtype
        size = case.compressor.nbytes(numel, dtype)
        assert (ct.nbytes, ct.payload.numel(), ct.payload.dtype) == (size, size, torch.uint8), f"{case}"
        assert size <= numel * dtype.itemsize, f"{case}: {size} bytes is more than dense"
        assert ct.kernels == (ran if has_kernel(ct.layout) else "reference"), f"{case}: recorded {ct.kernels}"
        decoded = ct.decompress()
        assert (decoded.dtype, decoded.shape) == (dtype, (numel,)), f"{case}"
        assert ct.finite, f"{case}: said not to be finite"
        assert bool(decoded.isfinite().all()), f"{case}: decodes to NaN or Inf"
        assert case.after is None or bool(case.after.isfinite().all()), f"{case}: residual of NaN or Inf"
        data = ct.to_bytes()
        read = CompressedTensor.from_bytes(data)
        assert read.to_bytes() == data, f"{case}: packs to other bytes"
        expected = size + frame.HEADER_BYTES + len(thinwire.format_spec(case.compressor))
        assert len(data) == expected, f"{case}: {len(data)} bytes"
        assert (read.compressor, read.numel, read.dtype) == (case.compressor, ct.numel, ct.dtype), f"{case}"
        assert (read.finite, read.kernels) == (True, "frame"), f"{case}"
        assert bytes_of(read.payload) == bytes_of(ct.payload), f"{case}: another payload"
    for spec, cases in groupby(table, lambda case: thinwire.format_spec(case.compressor)):
        same = list(cases)
        assert same[0].compressor.stats.kernels == Counter(case.ct.kernels for case in same), spec


def test_decoding_into_any_dtype(table: list[Case]) -> None:
    """What was sent, or out + weight * what was sent, in the arithmetic of the dtype that is written, rounded to it."""
    for case in table:
        if case.tensor.numel() > 5000 or case.kind == "huge":
            continue
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            decoded = case.ct.decompress(torch.empty(case.tensor.shape, dtype=dtype))
            assert torch.equal(decoded, case.sent.to(residual_dtype(dtype)).to(dtype)), f"{case}: into {dtype}"
        weights = (1.0, -1.0, 0.5, 1 / 3) if case.tensor.numel() < 3 else (-1.0, 1 / 3)
        for dtype, weight in product({case.tensor.dtype, torch.float32} if case.before is not None else (), weights):
            arithmetic, out = residual_dtype(dtype), case.before.to(dtype, copy=True)
            expected = (out.to(arithmetic) + case.sent.to(arithmetic) * weight).to(dtype)
            assert case.compressor.accumulate(case.ct, out, weight) is out
            if isinstance(case.ct.layout, DenseLayout):  # torch's own addition may round once instead of twice
                off = (out.to(torch.float64) - expected.to(torch.float64)).abs()
                info, added = torch.finfo(arithmetic), (case.sent.to(torch.float64) * weight).abs()
                allowed = info.eps * (added + info.smallest_normal) + torch.finfo(dtype).eps * expected.abs()
                assert (off <= allowed).all(), f"{case}: weight {weight} into {dtype}"
            else:
                assert torch.equal(out, expected), f"{case}: weight {weight} into {dtype}"


def test_payload_is_written_whole_and_nothing_else(table: list[Case]) -> None:
    """No byte of old memory is sent, at any address, and the caller's tensor is only read."""
    for index, case in enumerate(table):
        if case.tensor.numel() > 5000 or isinstance(case.ct.layout, DenseLayout) != (index % 5 == 0):
            continue
        expected, tensor = bytes_of(case.ct.payload), case.tensor.clone()
        with guarded(case.ct.nbytes, torch.uint8, offset=index % 8) as out:
            residual = None if case.before is None else case.before.clone()
            ct = case.compressor.compress(tensor, residual, key=KEY, out=out)
            assert ct.payload is out
            assert bytes_of(out) == expected, f"{case}: other bytes at another address"
            assert same_bits(ct.decompress(torch.empty_like(case.sent)), case.sent), f"{case}: misread from there"
        assert same_bits(tensor, case.tensor), f"{case}: the tensor was written"


def records(case: Case) -> list[Record]:
    layout = case.ct.layout
    if isinstance(layout, TopKLayout):
        return read_topk(case.ct.payload, layout)
    return read_quantize(case.ct.payload, layout) if isinstance(layout, QuantizeLayout) else []


def test_positions_are_those_of_a_stable_sort(table: list[Case]) -> None:
    """The k largest of each chunk, ties to the lowest position, whatever the kernel does to find them."""
    if table[0].compressor.name != "topk":
        pytest.skip("only top-k selects")
    checked = 0
    for case in table:
        if not isinstance(case.ct.layout, TopKLayout):
            continue
        found = np.concatenate([record.positions.reshape(-1) for record in records(case)])
        assert found.tolist() == topk_positions(case.came_in, case.ct.layout), f"{case}: other positions"
        at = torch.from_numpy(found)
        assert not case.sent.index_fill(0, at, 0).any(), f"{case}: decodes to something at another position"
        if case.compressor.bits == 32:
            largest = torch.finfo(torch.float32).max
            expected = case.came_in[at].clamp(-largest, largest).to(torch.float32)
            assert torch.equal(case.sent[at], expected.to(case.sent.dtype)), f"{case}: other values"
        checked += 1
    assert checked, "every row was sent dense, so nothing was checked"


def test_payloads_agree_with_the_reference(table: list[Case], ran: str, request: pytest.FixtureRequest) -> None:
    """Same positions; scales within one unit in the last place; the same codes where the scales are the same."""
    if ran == "reference":
        pytest.skip("these are the reference's own")
    name, _ = request.node.callspec.params["table"]
    for case, other in zip(table, reference_rows(name), strict=True):
        assert case.ct.nbytes == other.ct.nbytes
        if not isinstance(case.ct.layout, TopKLayout | QuantizeLayout):
            assert bytes_of(case.ct.payload) == bytes_of(other.ct.payload), f"{case}: other bytes"
        for mine, theirs in zip(records(case), records(other), strict=True):
            assert np.array_equal(mine.positions, theirs.positions), f"{case}: other positions"
            if mine.scales is None or theirs.scales is None:
                assert np.array_equal(mine.codes, theirs.codes), f"{case}: other float32 values"
                continue
            off = np.abs(mine.scales - theirs.scales)
            assert off.max() <= 1, f"{case}: a scale is off by {off.max()} units in the last place"
            same = (off == 0).all(axis=1)
            assert np.array_equal(mine.codes[same], theirs.codes[same]), f"{case}: other codes at the same scales"


# What compressors are for: few bytes, and descent that reaches the optimum, since nothing is lost for good.


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
