"""Damaged and forged frames: either `FrameError`, or a frame that packs to the same bytes and decodes in its place."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import thinwire
from support.framing import EDGES, build, take_apart
from support.samples import accept_or_refuse, bounded, sample, samples
from thinwire import CompressedTensor, FrameError


@bounded(60)
@given(samples)
def test_undamaged(ct: CompressedTensor) -> None:
    assert accept_or_refuse(ct.to_bytes()) is not None
    fields, spec, payload = take_apart(ct.to_bytes())
    assert build(spec, payload, **fields) == ct.to_bytes()


@bounded(400)
@given(samples, st.data())
def test_bits_flipped(ct: CompressedTensor, data: st.DataObject) -> None:
    """Up to three bits anywhere: the checksum sees every one of these."""
    damaged = bytearray(ct.to_bytes())
    bits = st.integers(0, 8 * len(damaged) - 1)
    for bit in data.draw(st.lists(bits, min_size=1, max_size=3, unique=True), label="bits"):
        damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        CompressedTensor.from_bytes(damaged)


@bounded(300)
@given(samples, st.data())
def test_cut_and_inserted(ct: CompressedTensor, data: st.DataObject) -> None:
    whole = ct.to_bytes()
    start = data.draw(st.integers(0, len(whole)), label="start")
    stop = data.draw(st.integers(start, len(whole)), label="stop")
    damaged = whole[:start] + data.draw(st.binary(max_size=20), label="inserted") + whole[stop:]
    assert damaged == whole or accept_or_refuse(damaged) is None


@bounded(600)
@given(samples, st.data())
def test_header_forged(ct: CompressedTensor, data: st.DataObject) -> None:
    """Fields overwritten and the checksum made to fit, so that the inner checks must hold alone."""
    fields, spec, payload = take_apart(ct.to_bytes())
    near = [ct.numel + 1, max(0, ct.numel - 1), ct.numel + 4096, 2 * ct.numel, ct.nbytes, len(spec)]
    number = st.one_of(st.sampled_from(EDGES + near), st.integers(0, (1 << 64) - 1))
    limits = {"version": 1 << 8, "dtype": 1 << 8, "spec_length": 1 << 16}
    for name in data.draw(st.sets(st.sampled_from(["numel", "key", "length", *limits]), min_size=1, max_size=3)):
        fields[name] = data.draw(number, label=name) % limits.get(name, 1 << 64)
    if data.draw(st.booleans(), label="small dtype"):
        fields["dtype"] = data.draw(st.integers(1, 4), label="dtype")
        fields["version"] = 1
    accept_or_refuse(build(spec, payload, **fields))


@bounded(800)
@given(samples, st.data())
def test_payload_forged(ct: CompressedTensor, data: st.DataObject) -> None:
    """Bytes of the payload overwritten, the checksum made to fit: positions, scales, codes and padding."""
    fields, spec, payload = take_apart(ct.to_bytes())
    forged = bytearray(payload)
    places = st.one_of(st.integers(0, len(forged) - 1), st.integers(max(0, len(forged) - 80), len(forged) - 1))
    if forged:
        for at in data.draw(st.lists(places, min_size=1, max_size=4), label="places"):
            forged[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 0x7F, 0x80, 0xFF])), label="byte")
    accept_or_refuse(build(spec, bytes(forged), **fields))


@bounded(400)
@given(samples, samples, st.data())
def test_spec_forged(ct: CompressedTensor, other: CompressedTensor, data: st.DataObject) -> None:
    """The payload of one compressor under the name of another, or under a name with a few characters changed."""
    fields, spec, payload = take_apart(ct.to_bytes())
    if data.draw(st.booleans(), label="of another compressor"):
        spec = thinwire.format_spec(other.compressor).encode()
        size = other.compressor.nbytes(ct.numel, ct.dtype)
        payload = payload[:size] + bytes(max(0, size - len(payload)))
    else:
        forged = bytearray(spec)
        for at in data.draw(st.lists(st.integers(0, len(spec) - 1), min_size=1, max_size=2), label="places"):
            forged[at] = data.draw(st.sampled_from(list(b"0123456789/.,:=-%enotpk\x00\xff")), label="character")
        spec = bytes(forged)
    accept_or_refuse(build(spec, payload, **fields))


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
    header = {"spec_length": spec_length % (len(rest) + 1), "key": key, "numel": numel}
    accept_or_refuse(build(rest[: header["spec_length"]], rest[header["spec_length"] :], **header))


def test_every_single_bit() -> None:
    """All of them, on one small frame, with and without a checksum that fits."""
    whole = sample("topk:ratio=1/8,bits=2,chunk=32", 100, thinwire.kernels.layout.DTYPES[0]).to_bytes()
    accepted = 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            CompressedTensor.from_bytes(damaged)
        forged = damaged[:32] + b"\0\0\0\0" + damaged[36:]
        fixed = thinwire.compressors.frame._checksum(forged[:32], forged[36:], b"")
        accepted += accept_or_refuse(bytes(forged[:32] + fixed + forged[36:])) is not None
    assert 0 < accepted < 8 * len(whole)
