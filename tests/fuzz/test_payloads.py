"""Hostile payloads straight into the kernels, as a collective hands them over: unchecked.

Whatever the bytes say, nothing is written outside `out`. The reference may raise; the others have nobody to raise to.
"""

import contextlib
import itertools
import os
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire
from support.cases import BACKENDS, DTYPES, SPECS
from support.framing import write_positions
from support.memory import guarded
from support.pairwise import pairwise
from support.processes import run_module
from support.samples import SMALL, bounded, complaint, sample
from thinwire import kernels
from thinwire.kernels.layout import Layout, QuantizeLayout, TopKLayout

SIZES = (1, 2, 31, 100, 1000, 4096, 4097, 8191, 12_289)


def decode_all(payloads: torch.Tensor, layout: Layout, weight: float, out_dtype: torch.dtype) -> None:
    for backend in BACKENDS:
        with kernels.force(backend), guarded(layout.numel, out_dtype) as out:
            _, kernel = kernels.select(layout, out.device)
            for add in (False, True):
                with contextlib.suppress(RuntimeError) if backend == "reference" else contextlib.nullcontext():
                    kernel.decode(payloads, layout, out, weight, add)


@bounded(800)
@given(
    st.sampled_from(SMALL),
    st.sampled_from(SIZES),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, 3),
    st.one_of(
        st.binary(min_size=1, max_size=64), st.sampled_from([b"\0", b"\xff", b"\x01", b"\x80", b"\x7f", b"\xff\0"])
    ),
    st.integers(0, (1 << 64) - 1),
)
def test_any_bytes(
    spec: str, numel: int, dtype: torch.dtype, out: torch.dtype, copies: int, content: bytes, key: int
) -> None:
    """Nothing is written outside `out`, and the check says the same with every backend."""
    layout = thinwire.compressor(spec).layout(numel, dtype).with_key(key)
    size = copies * layout.nbytes
    repeated = (content * (size // len(content) + 1))[:size]
    payloads = torch.frombuffer(bytearray(repeated), dtype=torch.uint8).view(copies, layout.nbytes)
    decode_all(payloads, layout, 0.5, out)
    assert (complaint(payloads[0], layout, "cpu") is None) == (complaint(payloads[0], layout, "reference") is None)


@bounded(300)
@given(
    st.sampled_from(["topk:ratio=1/64,bits=2", "topk:ratio=1/16,bits=32", "topk:ratio=1%,bits=1,chunk=none"]),
    st.sampled_from([1000, 4000, 5000, 9001]),
    st.randoms(use_true_random=False),
    st.sampled_from(DTYPES),
)
def test_forged_positions(spec: str, numel: int, random: object, out: torch.dtype) -> None:
    """Records that are well formed but for their positions: beyond the end, repeated, falling."""
    layout = thinwire.compressor(spec).layout(numel, torch.float32)
    assert isinstance(layout, TopKLayout)
    raw = bytearray()
    for record, rows in ((layout.record, layout.rows), (layout.tail, 1)):
        for _ in range(rows if record else 0):
            last = (((record.n - 1) >> record.low_bits) << record.low_bits) + (1 << record.low_bits) - 1
            positions = sorted(random.randint(max(0, last - 4 * record.k), last) for _ in range(record.k))
            raw += bytes([0x80, 0x3F] * record.low_at)[: record.low_at] + write_positions(positions, record)
    decode_all(torch.frombuffer(raw, dtype=torch.uint8).unsqueeze(0), layout, 1.0, out)


def test_any_bytes_with_several_threads() -> None:
    """Large enough for the kernels to share the work: each thread must find its place in what it cannot trust."""
    generator = torch.Generator().manual_seed(0)
    for spec in ("topk:ratio=1/64,bits=2", "quantize:bits=8"):
        layout = thinwire.compressor(spec).layout(300_001, torch.float32)
        noise = torch.randint(0, 256, (2, layout.nbytes), generator=generator, dtype=torch.uint8)
        for payloads in (noise, noise & noise.roll(1), torch.full_like(noise, 0xFF), torch.zeros_like(noise)):
            decode_all(payloads, layout, 1.0, torch.float32)


@bounded(100)
@given(st.sampled_from(SMALL), st.sampled_from(SIZES), st.sampled_from(DTYPES), st.integers(0, 7))
def test_encoding_stays_inside_the_payload(spec: str, numel: int, dtype: torch.dtype, offset: int) -> None:
    """At any address, for good tensors and for those that are not finite."""
    compressor = thinwire.compressor(spec)
    for poison in (False, True):
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        if poison:
            tensor[-1] = torch.inf
        for backend in BACKENDS:
            with kernels.force(backend), guarded(compressor.nbytes(numel, dtype), torch.uint8, offset=offset) as out:
                assert compressor.compress(tensor, key=3, out=out).finite is not poison


def fields_of(layout: Layout) -> list[tuple[int, int]]:
    """Where the fields of each record begin and end: scales, codes, low bits, bitmap; or the values, as one field."""
    fields, start = [], 0
    if isinstance(layout, TopKLayout):
        for record in [layout.record] * layout.rows + ([layout.tail] if layout.tail else []):
            ends = [0, record.codes_at, record.low_at, record.high_at, record.nbytes]
            fields += [(start + a, start + b) for a, b in itertools.pairwise(ends)]
            start += record.nbytes
    elif isinstance(layout, QuantizeLayout):
        for elements, part in layout.parts(1):
            scales = part.nbytes.start + layout.scales_nbytes(elements)
            fields += [(part.nbytes.start, scales), (scales, part.nbytes.stop)]
    else:
        fields = [(0, layout.nbytes)]
    return [(begin, end) for begin, end in fields if end > begin]


SCALES = (0, 0x7FC0, 0x7F80, 0x7F7F, 0x7E00, 0x0080, 0x007F, 0x8000, 0xFFFF)


@pytest.mark.parametrize("name", SPECS)
def test_one_change_is_checked_as_by_the_reference(name: str) -> None:
    """A bit, a byte or two bytes changed in every field of the first and the last record, and of others by chance."""
    for spec in (spec for spec in SMALL if spec.startswith(name)):
        chance, refused = random.Random(spec), 0
        for numel, dtype in pairwise((1, 7, 33, 100, 700, 4097, 9001), (torch.float32, chance.choice(DTYPES[1:]))):
            layout = thinwire.compressor(spec).layout(numel, dtype)
            fields = fields_of(layout)
            places = [*fields[:4], *fields[-4:], *chance.choices(fields, k=4)]
            for (begin, end), marked in itertools.product(places, (False, False, False, True)):
                payload = sample(spec, numel, dtype, marked).payload.clone()
                at, kind = chance.choice([begin, end - 1, chance.randrange(begin, end)]), chance.randrange(3)
                if kind == 0:
                    payload[at] ^= 1 << chance.randrange(8)
                elif kind == 1:
                    payload[at] = chance.choice([0, 0xFF, 0x80, 0x7F, chance.randrange(256)])
                else:
                    at, scale = min(at & ~1, layout.nbytes - 2), chance.choice(SCALES)
                    payload[at], payload[at + 1] = scale & 0xFF, scale >> 8
                said, expected = (complaint(payload, layout, backend) for backend in ("cpu", "reference"))
                assert (said is None) == (expected is None), (spec, numel, dtype, marked, at, kind)
                if not marked:  # in a marked payload two things are wrong: a bad scale, and that it is no mark
                    assert said == expected, (spec, numel, dtype, at, kind)
                refused += said is not None
        assert refused > 10, spec


def test_every_bit_is_checked_as_by_the_reference() -> None:
    specs = ("topk:ratio=1/8,bits=2,chunk=none", "topk:ratio=1/3,bits=1,chunk=64")
    for spec, numel in itertools.product(specs, (40, 100, 500)):
        layout = thinwire.compressor(spec).layout(numel, torch.float32)
        for bit in range(8 * layout.nbytes):
            payload = sample(spec, numel, torch.float32).payload.clone()
            payload[bit // 8] ^= 1 << bit % 8
            assert complaint(payload, layout, "cpu") == complaint(payload, layout, "reference"), (spec, numel, bit)


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
def test_cpu_kernels_touch_nothing_beyond_their_buffers() -> None:
    """Nothing is read there: buffers stand against pages without access, in a process that one byte more would end."""
    assert run_module("guard_pages") == "survived"
