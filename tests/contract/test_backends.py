"""Results depend on nothing but the input: neither on the backend nor on threads.

The reference is the specification, and an oracle that shares no code with it checks both.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch

import thinwire
from support.cases import ALL_SPECS, BACKENDS, DTYPES, KEY, SPECS, has_kernel, make_input, rows
from support.oracle import bytes_of, read_quantize, same_bits
from support.pairwise import pairwise
from thinwire import kernels
from thinwire.kernels.layout import DenseLayout

NUMEL = 300_007
"""More than four times what the kernels hold worth a thread of its own."""
THREADED = [spec for spec in ALL_SPECS if has_kernel(thinwire.compressor(spec).layout(NUMEL, torch.float32))]


@pytest.mark.parametrize("name", SPECS)
def test_decoding_agrees_to_the_last_bit(name: str) -> None:
    """Ranks with different kernels decode the same payloads: their sums must not drift apart."""
    columns = ((1, 4097, 100_003), DTYPES, DTYPES, ("ties", "denormals", "huge", "normal"), (None, 1.0, -0.5, 1 / 3))
    for spec in SPECS[name]:
        compressor = thinwire.compressor(spec)
        for numel, dtype, out, kind, weight in pairwise(*columns):
            if not has_kernel(compressor.layout(numel, dtype)):
                continue
            tensor, residual = make_input(kind, numel, dtype)
            with kernels.force("reference"):
                ct = compressor.compress(tensor, residual.clone(), key=KEY)
            results = []
            for backend in BACKENDS:
                with kernels.force(backend):
                    target = residual.to(out, copy=True)
                    if weight is None:
                        compressor.decompress(ct, target)
                    else:
                        compressor.accumulate(ct, target, weight)
                    results.append(target)
            assert same_bits(*results), f"{spec}, {numel} x {dtype} into {out}, {kind}, weight {weight}"


def test_several_payloads_add_up_in_their_order(backend: str) -> None:
    """What a collective does: one decode of all ranks' payloads is the same as one after the other, to the last bit."""
    for spec, dtype, numel in pairwise(ALL_SPECS, DTYPES, (1, 4097, 9001)):
        compressor = thinwire.compressor(spec)
        cts = [compressor.compress(make_input("normal", numel, dtype, seed)[0], key=KEY) for seed in range(3)]
        expected, together = (torch.ones(numel, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2))
        for ct in cts:
            compressor.accumulate(ct, expected, 1 / 3)
        compressor.accumulate(cts[0], together, 1 / 3, payloads=torch.stack([ct.payload for ct in cts]))
        assert same_bits(together, expected), f"{spec}, {numel} x {dtype}, {backend}"


def test_levels_are_what_the_format_says(backend: str) -> None:
    """Values computed from the bytes by hand: sign times index times scale; of 1 bit the sign times the scale."""
    for case in rows("quantize", backend):
        layout, decoded = case.ct.layout, []
        if isinstance(layout, DenseLayout) or layout.numel > 5000:
            continue
        for record in read_quantize(case.ct.payload, layout):
            codes = record.codes.reshape(-1)
            scales = (
                (record.scales.astype(np.uint32) << 16).view(np.float32).reshape(-1).repeat(layout.block)[: len(codes)]
            )
            index = codes & ((1 << layout.bits - 1) - 1) if layout.bits > 1 else 1
            decoded.append(np.where(codes >> layout.bits - 1, -1, 1) * (index * scales).astype(np.float32))
        expected = torch.from_numpy(np.concatenate(decoded)).to(case.sent.dtype)
        assert torch.equal(case.sent, expected), f"{case}"


def run(spec: str, dtype: torch.dtype, kind: str) -> tuple[bytes, bytes, bytes]:
    compressor = thinwire.compressor(spec)
    tensor, residual = make_input(kind, NUMEL, dtype)
    ct = compressor.compress(tensor, residual, key=KEY)
    total = compressor.accumulate(ct, torch.ones(NUMEL, dtype=dtype), 0.5)
    return bytes_of(ct.payload), bytes_of(residual), bytes_of(total)


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Three of them, even on a machine with fewer cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_the_number_of_threads_changes_nothing() -> None:
    for spec, (dtype, kind) in pairwise(THREADED, ((torch.float32, "normal"), (torch.bfloat16, "ties"))):
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with kernels.force("cpu"):
                results.append(run(spec, dtype, kind))
        assert results[0] == results[1] == results[2], f"{spec}, {dtype}, {kind}: other bytes with other threads"


@pytest.mark.usefixtures("three_threads")
def test_a_nan_in_any_thread_s_share_is_seen() -> None:
    for spec, at in pairwise(THREADED, (0, NUMEL // 2, NUMEL - 1)):
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
