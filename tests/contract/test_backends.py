"""Backends agree: the reference is the specification, and an oracle that shares no code with it checks both."""

import numpy as np
import pytest
import torch

import thinwire
from cases import ALL_SPECS, BACKENDS, DTYPES, INPUTS, KEY, SIZES, Case, make_input, rows
from oracle import Record, bytes_of, read_quantize, read_topk, same_bits, scale_values, topk_positions
from thinwire import CompressedTensor, kernels
from thinwire.kernels.layout import DenseLayout, QuantizeLayout, TopKLayout

TOPK = [spec for spec in ALL_SPECS if spec.startswith("topk")]
OTHERS = [name for name in BACKENDS if name != "reference"]


def compress(spec: str, backend: str, sizes: tuple[int, ...] = SIZES) -> list[Case]:
    with kernels.force(backend):
        return list(rows(spec, backend, sizes))


def records(ct: CompressedTensor) -> list[Record]:
    layout = ct.layout
    if isinstance(layout, TopKLayout):
        return read_topk(ct.payload, layout)
    return read_quantize(ct.payload, layout) if isinstance(layout, QuantizeLayout) else []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", TOPK)
def test_positions_are_those_of_a_stable_sort(spec: str, backend: str) -> None:
    """The k largest of each chunk, ties to the lowest position, whatever the kernel does to find them."""
    checked = 0
    for case in compress(spec, backend):
        if not isinstance(case.ct.layout, TopKLayout):
            continue
        found = np.concatenate([record.positions.reshape(-1) for record in records(case.ct)])
        assert found.tolist() == topk_positions(case.came_in, case.ct.layout), f"{case}: other positions"
        at = torch.from_numpy(found)
        assert not case.sent.index_fill(0, at, 0).any(), f"{case}: decodes to something at another position"
        if case.compressor.bits == 32:
            expected = case.came_in[at].clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
            assert torch.equal(case.sent[at], expected.to(torch.float32).to(expected.dtype)), f"{case}: other values"
        checked += 1
    assert checked, f"{spec}: every row was sent dense, so nothing was checked"


@pytest.mark.parametrize("spec", ALL_SPECS)
@pytest.mark.parametrize("backend", OTHERS)
def test_payloads_agree(spec: str, backend: str) -> None:
    """Same positions; scales within one unit in the last place; the same codes where the scales are the same."""
    for case, reference in zip(compress(spec, backend), compress(spec, "reference"), strict=True):
        assert case.ct.nbytes == reference.ct.nbytes
        if not isinstance(case.ct.layout, TopKLayout | QuantizeLayout):
            assert bytes_of(case.ct.payload) == bytes_of(reference.ct.payload), f"{case}: other bytes"
        for mine, theirs in zip(records(case.ct), records(reference.ct), strict=True):
            assert np.array_equal(mine.positions, theirs.positions), f"{case}: other positions"
            if mine.scales is None or theirs.scales is None:
                assert np.array_equal(mine.codes, theirs.codes), f"{case}: other float32 values"
                continue
            off = np.abs(mine.scales - theirs.scales)
            assert off.max() <= 1, f"{case}: a scale is off by {off.max()} units in the last place"
            same = (off == 0).all(axis=1)
            assert np.array_equal(mine.codes[same], theirs.codes[same]), f"{case}: other codes at the same scales"


@pytest.mark.parametrize("spec", ALL_SPECS)
@pytest.mark.parametrize("backend", OTHERS)
def test_decoding_agrees_to_the_last_bit(spec: str, backend: str) -> None:
    """Ranks with different kernels decode the same payloads: their sums must not drift apart."""
    compressor = thinwire.compressor(spec)
    for dtype in DTYPES:
        for numel in (1, 4097, 100_003):
            for kind in INPUTS:
                tensor, residual = make_input(kind, numel, dtype)
                with kernels.force("reference"):
                    ct = compressor.compress(tensor, residual.clone(), key=KEY)
                for out in DTYPES if numel < 5000 else (dtype,):
                    for weight in (None, 1.0, -0.5, 1 / 3):
                        results = []
                        for name in ("reference", backend):
                            with kernels.force(name):
                                target = residual.to(out, copy=True)
                                if weight is None:
                                    compressor.decompress(ct, target)
                                else:
                                    compressor.accumulate(ct, target, weight)
                                results.append(target)
                        what = f"{spec}, {numel} x {dtype} into {out}, {kind}, weight {weight}, {backend}"
                        assert same_bits(*results), f"{what}: other bits than the reference"


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_several_payloads_add_up_in_their_order(spec: str, backend: str) -> None:
    """What a collective does: one decode of all ranks' payloads is the same as one after the other, to the last bit."""
    compressor = thinwire.compressor(spec)
    for dtype in DTYPES:
        for numel in (1, 4097, 9001):
            cts = [compressor.compress(make_input("normal", numel, dtype, seed)[0], key=KEY) for seed in range(3)]
            arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
            expected = torch.ones(numel, dtype=arithmetic)
            for ct in cts:
                compressor.accumulate(ct, expected, 1 / 3)
            _, kernel = kernels.select(cts[0].layout, expected.device)
            together = torch.ones(numel, dtype=arithmetic)
            kernel.decode(torch.stack([ct.payload for ct in cts]), cts[0].layout, cts[0].key, together, 1 / 3, True)
            assert same_bits(together, expected), f"{spec}, {numel} x {dtype}, {backend}"


@pytest.mark.parametrize("spec", [spec for spec in ALL_SPECS if spec.startswith("quantize")])
def test_levels_are_what_the_format_says(spec: str, backend: str) -> None:
    """Values computed from the bytes by hand: sign times index times scale; of 1 bit the sign times the scale."""
    for case in compress(spec, backend, (1, 4095, 4097)):
        layout, decoded = case.ct.layout, []
        if isinstance(layout, DenseLayout):
            continue
        for record in records(case.ct):
            codes = record.codes.reshape(-1)
            scales = scale_values(record.scales).reshape(-1).repeat(layout.block)[: len(codes)]
            index = codes & ((1 << layout.bits - 1) - 1) if layout.bits > 1 else 1
            decoded.append(np.where(codes >> layout.bits - 1, -1, 1) * (index * scales).astype(np.float32))
        expected = torch.from_numpy(np.concatenate(decoded)).to(case.sent.dtype)
        assert torch.equal(case.sent, expected), f"{case}"
