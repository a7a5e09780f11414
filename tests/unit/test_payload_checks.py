"""Payloads that no compressor could have made, in frames that are right otherwise."""

import numpy as np
import pytest
import torch

import thinwire
from framing import build, write_positions
from thinwire import CompressedTensor, FrameError
from thinwire.kernels.layout import TopKLayout

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
    """4,000 entries: one short record, whose code has room for positions that its chunk has not."""

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
        refuse(self.spec, self.numel, self.with_positions(positions), "positions do not rise")

    def test_one_missing(self) -> None:
        data = bytearray(self.with_positions(list(range(self.record.k))))
        data[self.record.high_at] &= 0xFE
        refuse(self.spec, self.numel, data, f"does not hold {self.record.k} positions")

    def test_one_too_many(self) -> None:
        data = bytearray(self.with_positions(list(range(1000, 1000 + self.record.k))))
        data[self.record.high_at] |= 1
        refuse(self.spec, self.numel, data, f"does not hold {self.record.k} positions")

    @pytest.mark.parametrize("field", ["low_at", "high_at", "nbytes"])
    def test_padding_bits(self, field: str) -> None:
        """Behind the codes, behind the low bits and behind the bitmap: 63 entries fill none of them."""
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
