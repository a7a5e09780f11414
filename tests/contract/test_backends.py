"""Backends agree: the reference is the specification, and an oracle that shares no code with it checks both."""

import numpy as np
import pytest
import torch

import thinwire
from support.cases import ALL_SPECS, BACKENDS, DTYPES, KEY, WITH_RESIDUAL, make_input, rows
from support.oracle import bytes_of, read_quantize, same_bits, scale_values
from thinwire import kernels
from thinwire.kernels.layout import DenseLayout

OTHERS = [name for name in BACKENDS if name != "reference"]


@pytest.mark.parametrize("spec", WITH_RESIDUAL)
@pytest.mark.parametrize("backend", OTHERS)
def test_decoding_agrees_to_the_last_bit(spec: str, backend: str) -> None:
    """Ranks with different kernels decode the same payloads: their sums must not drift apart."""
    compressor = thinwire.compressor(spec)
    for dtype in DTYPES:
        for numel in (1, 4097, 100_003):
            for kind in ("ties", "denormals", "huge", "normal") if numel < 5000 else ("normal",):
                tensor, residual = make_input(kind, numel, dtype)
                with kernels.force("reference"):
                    ct = compressor.compress(tensor, residual.clone(), key=KEY)
                for out in DTYPES if numel < 5000 else (dtype,):
                    for weight in (None, 1 / 3) if numel > 1 else (None, 1.0, -0.5, 1 / 3):
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
    for case in rows(spec, backend, (1, 4095, 4097)):
        layout, decoded = case.ct.layout, []
        if isinstance(layout, DenseLayout):
            continue
        for record in read_quantize(case.ct.payload, layout):
            codes = record.codes.reshape(-1)
            scales = scale_values(record.scales).reshape(-1).repeat(layout.block)[: len(codes)]
            index = codes & ((1 << layout.bits - 1) - 1) if layout.bits > 1 else 1
            decoded.append(np.where(codes >> layout.bits - 1, -1, 1) * (index * scales).astype(np.float32))
        expected = torch.from_numpy(np.concatenate(decoded)).to(case.sent.dtype)
        assert torch.equal(case.sent, expected), f"{case}"


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_a_payload_may_lie_at_any_address(spec: str, backend: str) -> None:
    """As in the middle of a received message: neither its memory nor its place in it need be aligned."""
    compressor = thinwire.compressor(spec)
    for dtype in DTYPES:
        tensor, _ = make_input("normal", 4097, dtype)
        expected = compressor.compress(tensor, key=KEY)
        raw = bytearray(expected.nbytes + 16)
        for base, offset in ((1, 0), (1, 3), (2, 2), (3, 1), (4, 4), (1, 7), (5, 3), (0, 1)):
            out = torch.frombuffer(raw, dtype=torch.uint8, offset=base)[offset : offset + expected.nbytes]
            ct = compressor.compress(tensor, key=KEY, out=out)
            what = f"{spec}, {dtype}, base {base}, offset {offset}, {backend}"
            assert ct.finite, what
            assert bytes_of(ct.payload) == bytes_of(expected.payload), what
            assert same_bits(ct.decompress(), expected.decompress()), what
