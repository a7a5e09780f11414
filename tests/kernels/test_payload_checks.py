"""Payloads that no compressor could have made, in frames that are right otherwise."""

import numpy as np
import pytest
import torch

import thinwire
from support.cases import ALL_SPECS, DTYPES, INPUTS, KEY, make_input
from support.framing import build, write_positions
from support.memory import guarded
from support.pairwise import pairwise
from thinwire import CompressedTensor, FrameError, kernels
from thinwire.kernels.layout import Layout, TopKLayout, TopKRecord, topk_record

NAN, INF, MARK = 0x7FC00000, 0x7F800000, 0x7FC0


def payload_of(spec: str, numel: int) -> bytearray:
    tensor = torch.linspace(-1, 1, numel)[torch.randperm(numel, generator=torch.Generator().manual_seed(0))]
    return bytearray(thinwire.compressor(spec).compress(tensor, key=0).payload.numpy().tobytes())


def refuse(spec: str, numel: int, payload: bytes, message: str) -> None:
    canonical = thinwire.format_spec(thinwire.compressor(spec)).encode()
    with pytest.raises(FrameError, match=f"payload: .*{message}"):
        CompressedTensor.from_bytes(build(canonical, bytes(payload), numel=numel))


def put(payload: bytearray, at: int, number: int, size: int) -> bytearray:
    payload[at : at + size] = number.to_bytes(size, "little")
    return payload


class TestPositions:
    """4,000 elements: one short record, whose code has room for positions that its chunk has not."""

    spec, numel = "topk:ratio=1/64,bits=2", 4000

    @property
    def record(self):
        layout = thinwire.compressor(self.spec).layout(self.numel, torch.float32)
        assert isinstance(layout, TopKLayout)
        assert layout.tail is not None
        return layout.tail

    def with_positions(self, positions: list[int]) -> bytes:
        return bytes(payload_of(self.spec, self.numel)[: self.record.low_at]) + write_positions(positions, self.record)

    def test_the_hand_made_one_is_accepted(self) -> None:
        data = self.with_positions(list(range(self.record.k)))
        spec = thinwire.format_spec(thinwire.compressor(self.spec)).encode()
        decoded = CompressedTensor.from_bytes(build(spec, data, numel=self.numel)).decompress()
        assert decoded.nonzero().view(-1).tolist() == list(range(self.record.k))

    def test_out_of_range(self) -> None:
        for beyond in (4000, 4001, 4031):
            positions = [*range(self.record.k - 1), beyond]
            refuse(self.spec, self.numel, self.with_positions(positions), "a position is outside its chunk of 4000")

    def test_the_last_one_that_fits(self) -> None:
        data = self.with_positions([*range(self.record.k - 1), 3999])
        spec = thinwire.format_spec(thinwire.compressor(self.spec)).encode()
        assert CompressedTensor.from_bytes(build(spec, data, numel=self.numel)).decompress()[-1] != 0

    def test_not_rising(self) -> None:
        for first in ([0, 0], [1, 0], [5, 3]):
            positions = [*first, *range(100, 98 + self.record.k)]
            refuse(self.spec, self.numel, self.with_positions(positions), "positions are not in ascending order")

    def test_one_missing_or_too_many(self) -> None:
        for first in (0, 1000):
            data = bytearray(self.with_positions(list(range(first, first + self.record.k))))
            data[self.record.high_at] ^= 1
            refuse(self.spec, self.numel, data, f"another number of positions than {self.record.k}")

    def test_padding_bits(self) -> None:
        """Behind the codes, behind the low bits and behind the bitmap: 63 elements fill none of them."""
        for field in ("low_at", "high_at", "nbytes"):
            data = bytearray(self.with_positions(list(range(self.record.k))))
            data[getattr(self.record, field) - 1] ^= 0x80
            if field == "nbytes":  # keep the count right, or that is what is reported
                data[self.record.high_at] ^= 1
            refuse(self.spec, self.numel, data, "a bit beyond the last field is set")


def test_scales() -> None:
    """Two records each, so that a mark in the first alone is not the mark of all."""
    for spec in ("topk:ratio=1/64,bits=1", "topk:ratio=1/64,bits=8", "quantize:bits=8", "quantize:bits=1"):
        for bits in (0x8000, 0xBF80, 0x7F80, 0xFF80, 0x7F81, 0xFFC0, 0x7FFF, 0x0001, 0x007F):
            refuse(spec, 8192, put(payload_of(spec, 8192), 0, bits, 2), "a scale is negative")
        refuse(spec, 8192, put(payload_of(spec, 8192), 0, MARK, 2), "some scales are marked")


def test_floats() -> None:
    for spec in ("topk:ratio=1/64,bits=32", "randomk:ratio=1/16", "none"):
        refuse(spec, 8192, put(payload_of(spec, 8192), 4, NAN, 4), "some values are marked")
        for bits in (INF, INF | 1 << 31):
            refuse(spec, 8192, put(payload_of(spec, 8192), 4, bits, 4), "a value is infinite")


def test_padding_bits_of_quantize() -> None:
    for bits, numel in ((1, 4097), (2, 4098), (4, 4097)):
        payload = payload_of(f"quantize:bits={bits}", numel)
        payload[-1] |= 0x80
        refuse(f"quantize:bits={bits}", numel, payload, "a bit beyond the last field is set")


def test_dense_payload_of_half_floats() -> None:
    raw = np.ones(8, np.float16)
    raw[3] = np.inf
    with pytest.raises(FrameError, match="a value is infinite"):
        CompressedTensor.from_bytes(build(b"none", raw.tobytes(), numel=8, dtype=3))


def verdicts(payload: torch.Tensor, layout: Layout) -> list[str | None]:
    """What the quick check and the reference say against a payload, without the number of the record."""
    said: list[str | None] = []
    for backend in (None, "reference"):
        with kernels.force(backend):
            try:
                kernels.check(payload, layout)
                said.append(None)
            except ValueError as error:
                said.append(str(error).split(": ", 1)[-1])
    return said


class TestQuickCheck:
    """That of the CPU accepts what the reference accepts; the fuzz tests show that it refuses what that refuses."""

    def test_valid_payloads_and_the_mark(self) -> None:
        sizes = (1, 2, 15, 16, 100, 255, 1000, 4095, 4096, 4097, 9001, 70_001)
        for spec, numel, dtype, kind in pairwise(ALL_SPECS, sizes, DTYPES, (*INPUTS, "marked")):
            compressor, what = thinwire.compressor(spec), f"{spec}, {numel} x {dtype}, {kind}"
            tensor = make_input("normal" if kind == "marked" else kind, numel, dtype)[0]
            if kind == "marked":
                tensor[-1] = torch.nan
            payload = compressor.compress(tensor, key=KEY).payload
            assert verdicts(payload, compressor.layout(numel, dtype)) == [None, None], what

    def test_several_threads(self) -> None:
        """The last record of many, which another thread sees than the first."""
        for spec in ("topk:ratio=1/4,bits=2", "quantize:bits=1,block=32"):
            layout = thinwire.compressor(spec).layout(3_000_001, torch.float32)
            payload = torch.frombuffer(payload_of(spec, 3_000_001), dtype=torch.uint8)
            kernels.check(payload, layout)
            payload[-1], payload[-2] = 0xFF, 0x80
            quick, reference = verdicts(payload, layout)
            assert quick == reference, spec
            assert quick is not None, spec

    def test_says_which_record(self) -> None:
        for spec, nbytes in (("topk:ratio=1/64,bits=2", 84), ("quantize:bits=8", 4128), ("quantize:bits=1", 544)):
            layout = thinwire.compressor(spec).layout(10 * 4096 + 1000, torch.float32)
            for number in (0, 3, 9, 10):
                payload = put(payload_of(spec, layout.numel), number * nbytes, INF >> 16, 2)
                with pytest.raises(ValueError, match=f"^record {number}: a scale is negative, denormal, infinite or"):
                    kernels.check(torch.frombuffer(payload, dtype=torch.uint8), layout)

    def test_size_and_address(self) -> None:
        """Nothing is read outside."""
        for spec in ("topk:ratio=1/64,bits=32", "quantize:bits=4", "randomk:ratio=1/64", "none"):
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

    def test_every_other_byte_of_a_tensor(self) -> None:
        layout = thinwire.compressor("topk:ratio=1/64,bits=2").layout(9001, torch.float32)
        valid = torch.frombuffer(payload_of("topk:ratio=1/64,bits=2", 9001), dtype=torch.uint8)
        spread = torch.full((2 * layout.nbytes,), 0xFF, dtype=torch.uint8)
        spread[::2] = valid
        kernels.check(spread[::2], layout)

    def test_positions_far_apart(self) -> None:
        """Up to more low bits for each position than two of which come out of one load."""
        for width in range(8, 44):
            record = topk_record((1 << width) - 3, 3, 2)
            layout, last = TopKLayout(record.n, torch.float32, 1, record, None), record.n - 1
            for positions, good in (
                ([0, 1, last], True),
                ([last - 2, last - 1, last], True),
                ([5, last >> 1, last], True),
                ([5, 5, last], False),
                ([6, 5, last], False),
                ([0, last, last - 1], False),
                ([0, 1, last + 1], False),
            ):
                payload = torch.frombuffer(self.record_of(positions, record), dtype=torch.uint8)
                quick, reference = verdicts(payload, layout)
                assert quick == reference, (width, positions)
                assert (quick is None) is good, (width, positions)

    @staticmethod
    def record_of(positions: list[int], record: TopKRecord) -> bytearray:
        return bytearray([0x80, 0x3F, 0x80, 0x3F, 0]) + write_positions(positions, record)

    def test_a_level_that_overflows_only_counts_where_it_is_used(self) -> None:
        """Top-k: low + i * step is infinite for the highest i, and 4,000 elements are one record."""
        for bits in (2, 4, 8, 16):
            spec = f"topk:ratio=1/64,bits={bits}"
            layout = thinwire.compressor(spec).layout(4000, torch.float32)
            assert isinstance(layout, TopKLayout)
            assert layout.tail is not None
            payload = payload_of(spec, 4000)
            put(put(payload, 0, 0x7F7F, 2), 2, 0x7F7F, 2)
            assert (
                verdicts(torch.frombuffer(payload, dtype=torch.uint8), layout)
                == ["a value is infinite, expected finite numbers"] * 2
            )
            payload[4 : layout.tail.low_at] = bytes(layout.tail.low_at - 4)
            assert verdicts(torch.frombuffer(payload, dtype=torch.uint8), layout) == [None, None]

    def test_forced_reference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It needs nothing of the other kernels."""
        monkeypatch.setitem(kernels._MODULES["cpu"], TopKLayout, "thinwire.kernels.cpu.no_such_module")
        layout = thinwire.compressor("topk:ratio=1/64,bits=2").layout(9001, torch.float32)
        with kernels.force("reference"):
            kernels.check(torch.frombuffer(payload_of("topk:ratio=1/64,bits=2", 9001), dtype=torch.uint8), layout)
