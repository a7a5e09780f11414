"""Damaged and forged frames: either `FrameError`, or a frame that packs to the same bytes and decodes in its place."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import thinwire
from support.framing import build, take_apart
from support.samples import accept_or_refuse, bounded, sample, samples
from thinwire import CompressedTensor, FrameError


@bounded(400)
@given(samples, st.data())
def test_damaged(ct: CompressedTensor, data: st.DataObject) -> None:
    """Up to three bits flipped, or bytes cut out and others inserted: the checksum sees every one of these."""
    whole = ct.to_bytes()
    flipped, bits = bytearray(whole), st.integers(0, 8 * len(whole) - 1)
    for bit in data.draw(st.lists(bits, min_size=1, max_size=3, unique=True), label="bits"):
        flipped[bit // 8] ^= 1 << bit % 8
    start = data.draw(st.integers(0, len(whole)), label="start")
    stop = data.draw(st.integers(start, len(whole)), label="stop")
    cut = whole[:start] + data.draw(st.binary(max_size=20), label="inserted") + whole[stop:]
    for damaged in (bytes(flipped), cut):
        assert (accept_or_refuse(damaged) is not None) == (damaged == whole)


@bounded(200)
@given(samples, samples)
def test_the_payload_of_one_compressor_under_the_name_of_another(ct: CompressedTensor, other: CompressedTensor) -> None:
    fields, _, payload = take_apart(ct.to_bytes())
    size = other.compressor.nbytes(ct.numel, ct.dtype)
    payload = payload[:size] + bytes(max(0, size - len(payload)))
    accept_or_refuse(build(thinwire.format_spec(other.compressor).encode(), payload, **fields))


@bounded(600)
@given(st.binary(max_size=300))
@example(b"THNW")
@example(b"THNW\x01\x01" + bytes(30))
@example(b"THNW\x01\x01" + b"\xff" * 30)
def test_arbitrary_bytes(data: bytes) -> None:
    with pytest.raises(FrameError):
        CompressedTensor.from_bytes(data)


@bounded(300)
@given(st.integers(0, (1 << 16) - 1), st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 48), st.binary(max_size=80))
def test_arbitrary_bytes_behind_a_good_start(spec_length: int, key: int, numel: int, rest: bytes) -> None:
    split = spec_length % (len(rest) + 1)
    accept_or_refuse(build(rest[:split], rest[split:], key=key, numel=numel))


def test_every_single_bit() -> None:
    """All of them, on one small frame, with and without a checksum that fits."""
    whole = sample("topk:ratio=1/8,bits=2,chunk=32", 100, thinwire.kernels.layout.DTYPES[0]).to_bytes()
    accepted = 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            CompressedTensor.from_bytes(damaged)
        fixed = thinwire.compressors.frame._checksum(damaged[:32], damaged[36:], b"")
        accepted += accept_or_refuse(bytes(damaged[:32] + fixed + damaged[36:])) is not None
    assert 0 < accepted < 8 * len(whole)
