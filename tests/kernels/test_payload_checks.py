"""Payloads that no compressor could have made, in frames that are right otherwise."""

import numpy as np
import pytest
import torch

import thinwire
from support.cases import ALL_SPECS, DTYPES, INPUTS, KEY, make_input
from support.framing import build, write_positions
from support.memory import guarded
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

    @pytest.mark.parametrize("beyond", [4000, 4001, 4031])
    def test_out_of_range(self, beyond: int) -> None:
        positions = [*range(self.record.k - 1), beyond]
        refuse(self.spec, self.numel, self.with_positions(positions), "a position is outside its chunk of 4000")

    def test_the_last_one_that_fits(self) -> None:
        data = self.with_positions([*range(self.record.k - 1), 3999])
        spec = thinwire.format_spec(thinwire.compressor(self.spec)).encode()
        assert CompressedTensor.from_bytes(build(spec, data, numel=self.numel)).decompress()[-1] != 0

    @pytest.mark.parametrize("first", [[0, 0], [1, 0], [5, 3]])
    def test_not_rising(self, first: list[int]) -> None:
        positions = [*first, *range(100, 98 + self.record.k)]
        refuse(self.spec, self.numel, self.with_positions(positions), "positions are not in ascending order")

    def test_one_missing(self) -> None:
        data = bytearray(self.with_positions(list(range(self.record.k))))
        data[self.record.high_at] &= 0xFE
        refuse(self.spec, self.numel, data, f"another number of positions than {self.record.k}")

    def test_one_too_many(self) -> None:
        data = bytearray(self.with_positions(list(range(1000, 1000 + self.record.k))))
        data[self.record.high_at] |= 1
        refuse(self.spec, self.numel, data, f"another number of positions than {self.record.k}")

    @pytest.mark.parametrize("field", ["low_at", "high_at", "nbytes"])
    def test_padding_bits(self, field: str) -> None:
        """Behind the codes, behind the low bits and behind the bitmap: 63 elements fill none of them."""
        data = bytearray(self.with_positions(list(range(self.record.k))))
        data[getattr(self.record, field) - 1] ^= 0x80
        if field == "nbytes":  # keep the count right, or that is what is reported
            data[self.record.high_at] ^= 1
        refuse(self.spec, self.numel, data, "a bit beyond the last field is set")


@pytest.mark.parametrize(
    "spec", ["topk:ratio=1/64,bits=1", "topk:ratio=1/64,bits=8", "quantize:bits=8", "quantize:bits=1"]
)
class TestScales:
    """Two records each, so that a mark in the first alone is not the mark of all."""

    numel = 8192

    @pytest.mark.parametrize("bits", [0x8000, 0xBF80, 0x7F80, 0xFF80, 0x7F81, 0xFFC0, 0x7FFF, 0x0001, 0x007F])
    def test_not_a_scale(self, spec: str, bits: int) -> None:
        refuse(spec, self.numel, put(payload_of(spec, self.numel), 0, bits, 2), "a scale is negative")

    def test_mixed_marks(self, spec: str) -> None:
        refuse(spec, self.numel, put(payload_of(spec, self.numel), 0, MARK, 2), "some scales are marked")


@pytest.mark.parametrize("spec", ["topk:ratio=1/64,bits=32", "randomk:ratio=1/16", "none"])
class TestFloats:
    numel = 8192

    def test_mixed_marks(self, spec: str) -> None:
        refuse(spec, self.numel, put(payload_of(spec, self.numel), 4, NAN, 4), "some values are marked")

    @pytest.mark.parametrize("bits", [INF, INF | 1 << 31])
    def test_infinite(self, spec: str, bits: int) -> None:
        refuse(spec, self.numel, put(payload_of(spec, self.numel), 4, bits, 4), "a value is infinite")


@pytest.mark.parametrize(("bits", "numel"), [(1, 4097), (2, 4098), (4, 4097)])
def test_padding_bits_of_quantize(bits: int, numel: int) -> None:
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

    @pytest.mark.parametrize("spec", ALL_SPECS)
    @pytest.mark.parametrize("numel", [1, 2, 15, 16, 100, 255, 1000, 4095, 4096, 4097, 9001, 70_001])
    def test_valid_payloads_and_the_mark(self, spec: str, numel: int) -> None:
        compressor = thinwire.compressor(spec)
        for dtype in DTYPES:
            layout = compressor.layout(numel, dtype)
            for kind in INPUTS if numel < 5000 else ("huge", "normal"):
                payload = compressor.compress(make_input(kind, numel, dtype)[0], key=KEY).payload
                assert verdicts(payload, layout) == [None, None], kind
            tensor = torch.ones(numel, dtype=dtype)
            tensor[-1] = torch.nan
            mark = compressor.compress(tensor, key=KEY).payload
            assert verdicts(mark, layout) == [None, None]

    @pytest.mark.parametrize("spec", ["topk:ratio=1/4,bits=2", "quantize:bits=1,block=32", "randomk:ratio=1/2", "none"])
    def test_several_threads(self, spec: str) -> None:
        """The last record of many, which another thread sees than the first."""
        numel = 3_000_001
        layout = thinwire.compressor(spec).layout(numel, torch.float32)
        payload = torch.frombuffer(payload_of(spec, numel), dtype=torch.uint8)
        kernels.check(payload, layout)
        payload[-1] = 0xFF
        payload[-2] = 0x80
        quick, reference = verdicts(payload, layout)
        assert quick == reference
        assert quick is not None

    @pytest.mark.parametrize(
        ("spec", "record_nbytes"), [("topk:ratio=1/64,bits=2", 84), ("quantize:bits=8", 4128), ("quantize:bits=1", 544)]
    )
    def test_says_which_record(self, spec: str, record_nbytes: int) -> None:
        numel = 10 * 4096 + 1000
        layout = thinwire.compressor(spec).layout(numel, torch.float32)
        for number in (0, 3, 9, 10):
            payload = payload_of(spec, numel)
            put(payload, number * record_nbytes, INF >> 16, 2)
            with pytest.raises(ValueError, match=f"^record {number}: a scale is negative, denormal, infinite or NaN"):
                kernels.check(torch.frombuffer(payload, dtype=torch.uint8), layout)

    @pytest.mark.parametrize("spec", ["topk:ratio=1/64,bits=2", "quantize:bits=8", "randomk:ratio=1/64", "none"])
    @pytest.mark.parametrize("change", [-1, 1])
    def test_wrong_size(self, spec: str, change: int) -> None:
        """Nothing is read outside."""
        layout = thinwire.compressor(spec).layout(9001, torch.float32)
        expected = f"a payload of {layout.nbytes + change} bytes, expected {layout.nbytes} for 9001 elements"
        with pytest.raises(ValueError, match=expected):
            kernels.check(torch.zeros(layout.nbytes + change, dtype=torch.uint8), layout)

    @pytest.mark.parametrize("spec", ["topk:ratio=1/64,bits=32", "quantize:bits=4", "randomk:ratio=1/64", "none"])
    def test_any_address(self, spec: str) -> None:
        layout = thinwire.compressor(spec).layout(9001, torch.float32)
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

    @pytest.mark.parametrize("width", range(8, 44))
    def test_positions_far_apart(self, width: int) -> None:
        """Up to more low bits for each position than two of which come out of one load."""
        record = topk_record((1 << width) - 3, 3, 2)
        layout = TopKLayout(record.n, torch.float32, 1, record, None)
        last = record.n - 1
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
            assert quick == reference
            assert (quick is None) is good, positions

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
