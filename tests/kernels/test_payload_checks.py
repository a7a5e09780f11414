"""Payloads that no compressor could have made, in frames that are right otherwise."""

import numpy as np
import pytest
import torch

import thinwire
from support.cases import ALL_SPECS, DTYPES, INPUTS, KEY, make_input
from support.framing import build, write_positions
from support.memory import guarded
from support.pairwise import pairwise
from support.samples import complaint
from thinwire import CompressedTensor, FrameError, kernels
from thinwire.kernels.layout import Layout, TopKLayout, topk_record

NAN, INF, MARK = 0x7FC00000, 0x7F800000, 0x7FC0
TOPK = "topk:ratio=1/64,bits=2"


def payload_of(spec: str, numel: int) -> bytearray:
    tensor = torch.linspace(-1, 1, numel)[torch.randperm(numel, generator=torch.Generator().manual_seed(0))]
    return bytearray(thinwire.compressor(spec).compress(tensor, key=0).payload.numpy().tobytes())


def put(payload: bytearray, at: int, number: int, size: int) -> bytearray:
    payload[at : at + size] = number.to_bytes(size, "little")
    return payload


def read(spec: str, numel: int, payload: bytes) -> CompressedTensor:
    canonical = thinwire.format_spec(thinwire.compressor(spec)).encode()
    return CompressedTensor.from_bytes(build(canonical, bytes(payload), numel=numel))


def refuse(spec: str, numel: int, payload: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=f"payload: .*{message}"):
        read(spec, numel, payload)


def verdict(payload: bytes, layout: Layout) -> str | None:
    """What the quick check says against a payload. The reference must say the same."""
    given = torch.frombuffer(payload, dtype=torch.uint8)
    quick = complaint(given, layout, "cpu")
    assert quick == complaint(given, layout, "reference"), layout
    return quick


def test_positions_and_padding_of_topk() -> None:
    """4,000 elements: one short record, whose code has room for positions that its chunk has not."""
    layout = thinwire.compressor(TOPK).layout(4000, torch.float32)
    assert isinstance(layout, TopKLayout)
    record = layout.tail
    assert record is not None

    def made(positions: list[int]) -> bytearray:
        return payload_of(TOPK, 4000)[: record.low_at] + write_positions(positions, record)

    first = list(range(record.k))
    for positions in (first, [*first[:-1], 3999]):
        assert read(TOPK, 4000, made(positions)).decompress().nonzero().view(-1).tolist() == positions
    for beyond in (4000, 4001, 4031):
        refuse(TOPK, 4000, made([*first[:-1], beyond]), "a position is outside its chunk of 4000")
    for start in ([0, 0], [1, 0], [5, 3]):
        refuse(TOPK, 4000, made([*start, *range(100, 98 + record.k)]), "positions are not in ascending order")
    for start in (0, 1000):
        data = made(list(range(start, start + record.k)))
        data[record.high_at] ^= 1
        refuse(TOPK, 4000, data, f"another number of positions than {record.k}")
    for field in ("low_at", "high_at", "nbytes"):  # 63 elements fill none of the fields before these
        data = made(first)
        data[getattr(record, field) - 1] ^= 0x80
        if field == "nbytes":  # keep the count right, or that is what is reported
            data[record.high_at] ^= 1
        refuse(TOPK, 4000, data, "a bit beyond the last field is set")


def test_scales_and_padding() -> None:
    """Two records each, so that a mark in the first alone is not the mark of all."""
    for spec in ("topk:ratio=1/64,bits=1", "topk:ratio=1/64,bits=8", "quantize:bits=8", "quantize:bits=1"):
        for bits in (0x8000, 0xBF80, 0x7F80, 0xFF80, 0x7F81, 0xFFC0, 0x7FFF, 0x0001, 0x007F):
            refuse(spec, 8192, put(payload_of(spec, 8192), 0, bits, 2), "a scale is negative")
        refuse(spec, 8192, put(payload_of(spec, 8192), 0, MARK, 2), "some scales are marked")
    for bits, numel in ((1, 4097), (2, 4098), (4, 4097)):
        payload = payload_of(f"quantize:bits={bits}", numel)
        payload[-1] |= 0x80
        refuse(f"quantize:bits={bits}", numel, payload, "a bit beyond the last field is set")


def test_floats() -> None:
    for spec in ("topk:ratio=1/64,bits=32", "randomk:ratio=1/16", "none"):
        refuse(spec, 8192, put(payload_of(spec, 8192), 4, NAN, 4), "some values are marked")
        for bits in (INF, INF | 1 << 31):
            refuse(spec, 8192, put(payload_of(spec, 8192), 4, bits, 4), "a value is infinite")
    raw = np.ones(8, np.float16)
    raw[3] = np.inf
    with pytest.raises(FrameError, match="a value is infinite"):
        CompressedTensor.from_bytes(build(b"none", raw.tobytes(), numel=8, dtype=3))


def test_valid_payloads_and_the_mark_are_accepted() -> None:
    """The fuzz tests show that the quick check refuses what the reference refuses."""
    sizes = (1, 2, 15, 16, 100, 255, 1000, 4095, 4096, 4097, 9001, 70_001)
    for spec, numel, dtype, kind in pairwise(ALL_SPECS, sizes, DTYPES, (*INPUTS, "marked")):
        compressor, what = thinwire.compressor(spec), f"{spec}, {numel} x {dtype}, {kind}"
        tensor = make_input("normal" if kind == "marked" else kind, numel, dtype)[0]
        if kind == "marked":
            tensor[-1] = torch.nan
        payload = compressor.compress(tensor, key=KEY).payload.numpy().tobytes()
        assert verdict(bytearray(payload), compressor.layout(numel, dtype)) is None, what


def test_every_thread_checks_and_says_which_record() -> None:
    for spec in ("topk:ratio=1/4,bits=2", "quantize:bits=1,block=32"):
        payload, layout = payload_of(spec, 3_000_001), thinwire.compressor(spec).layout(3_000_001, torch.float32)
        kernels.check(torch.frombuffer(payload, dtype=torch.uint8), layout)
        assert verdict(put(payload, len(payload) - 2, 0xFF80, 2), layout) is not None, spec
    for spec, nbytes in ((TOPK, 84), ("quantize:bits=8", 4128), ("quantize:bits=1", 544)):
        layout = thinwire.compressor(spec).layout(10 * 4096 + 1000, torch.float32)
        for number in (0, 3, 9, 10):
            payload = put(payload_of(spec, layout.numel), number * nbytes, INF >> 16, 2)
            with pytest.raises(ValueError, match=f"^record {number}: a scale is negative, denormal, infinite or"):
                kernels.check(torch.frombuffer(payload, dtype=torch.uint8), layout)


def test_any_address_and_stride_but_no_other_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read outside. The reference needs nothing of the other kernels."""
    for spec in (TOPK, "topk:ratio=1/64,bits=32", "quantize:bits=4", "randomk:ratio=1/64", "none"):
        layout = thinwire.compressor(spec).layout(9001, torch.float32)
        for wrong in (layout.nbytes - 1, layout.nbytes + 1):
            expected = f"a payload of {wrong} bytes, expected {layout.nbytes} for 9001 elements"
            with pytest.raises(ValueError, match=expected):
                kernels.check(torch.zeros(wrong, dtype=torch.uint8), layout)
        valid = torch.frombuffer(payload_of(spec, 9001), dtype=torch.uint8)
        for offset in range(8):
            with guarded(layout.nbytes, torch.uint8, offset=offset) as payload:
                payload.copy_(valid)
                kernels.check(payload, layout)
        if spec == TOPK:
            spread = torch.full((2 * layout.nbytes,), 0xFF, dtype=torch.uint8)
            spread[::2] = valid
            kernels.check(spread[::2], layout)
        with monkeypatch.context() as patch, kernels.force("reference"):
            patch.setitem(kernels._MODULES["cpu"], type(layout), "thinwire.kernels.cpu.no_such_module")
            kernels.check(valid, layout)


def test_positions_far_apart() -> None:
    """Up to more low bits for each position than two of which come out of one load."""
    for width in range(8, 44):
        record = topk_record((1 << width) - 3, 3, 2)
        layout, last = TopKLayout(record.n, torch.float32, 1, record, None), record.n - 1
        good = [[0, 1, last], [last - 2, last - 1, last], [5, last >> 1, last]]
        for positions in (*good, [5, 5, last], [6, 5, last], [0, last, last - 1], [0, 1, last + 1]):
            payload = bytearray([0x80, 0x3F, 0x80, 0x3F, 0]) + write_positions(positions, record)
            assert (verdict(payload, layout) is None) is (positions in good), (width, positions)


def test_a_level_that_overflows_only_counts_where_it_is_used() -> None:
    """Top-k: low + i * step is infinite for the highest i, and 4,000 elements are one record."""
    for bits in (2, 4, 8, 16):
        spec = f"topk:ratio=1/64,bits={bits}"
        layout = thinwire.compressor(spec).layout(4000, torch.float32)
        assert isinstance(layout, TopKLayout)
        assert layout.tail is not None
        payload = put(payload_of(spec, 4000), 0, 0x7F7F7F7F, 4)
        assert verdict(payload, layout) == "a value is infinite, expected finite numbers"
        payload[4 : layout.tail.low_at] = bytes(layout.tail.low_at - 4)
        assert verdict(payload, layout) is None
