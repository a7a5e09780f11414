"""The wire frame: one test for each reason to refuse bytes, in the order in which they are checked."""

import pytest
import torch

import thinwire
from support.framing import build
from thinwire import CompressedTensor, FrameError, kernels

SPEC = b"topk:ratio=1/64,bits=2,chunk=4096"
NUMEL = 9000
with kernels.force("reference"):
    GOOD = thinwire.compressor(SPEC.decode()).compress(torch.linspace(-1, 1, NUMEL)).to_bytes()
PAYLOAD = GOOD[36 + len(SPEC) :]


def make(spec: bytes = SPEC, payload: bytes = PAYLOAD, **header: int | bytes) -> bytes:
    return build(spec, payload, **{"numel": NUMEL, **header})


def test_the_frame_made_by_hand_is_the_library_s() -> None:
    assert make() == GOOD
    for kind in (bytes, bytearray, memoryview):
        data = kind(GOOD)
        read = CompressedTensor.from_bytes(data, numel=NUMEL)
        if isinstance(data, bytearray):
            data[:] = bytes(len(data))  # what was read is a copy
        assert (read.numel, read.dtype, read.kernels, read.to_bytes()) == (NUMEL, torch.float32, "frame", GOOD), kind


REASONS = {
    "empty": (b"", "cut short: 0 bytes, expected a header of 36"),
    "header cut short": (GOOD[:35], "cut short: 35 bytes, expected a header of 36"),
    "magic": (make(magic=b"THNX"), "starts with b'THNX', expected b'THNW'"),
    "version 2": (make(version=2), "version 2, expected 1"),
    "dtype code 0": (make(dtype=0), r"dtype code 0, expected one of \[1, 2, 3, 4\]"),
    "too many elements": (make(numel=(1 << 48) + 1), f"{(1 << 48) + 1} elements, expected at most {1 << 48}"),
    "payload cut short": (GOOD[:-1], f"cut short: {len(GOOD) - 1} bytes, expected {len(GOOD)}"),
    "byte too many": (GOOD + b"\0", f"too long: {len(GOOD) + 1} bytes, expected {len(GOOD)}"),
    "length overflows": (make(length=(1 << 64) - 1), f"cut short: .* expected {(1 << 64) - 1 + 36 + len(SPEC)}"),
    "length too small": (make(length=3), "too long"),
    "spec longer than the frame": (make(spec_length=65535), "cut short"),
    "checksum": (make(crc=0), "checksum 00000000, expected .*damaged"),
    "spec not ASCII": (make(spec=b"topk\xff"), r"the spec b'topk\\xff' is not ASCII"),
    "spec empty": (make(spec=b""), "compressor '' in '' is unknown"),
    "compressor unknown": (make(spec=b"zip:level=9"), "compressor 'zip' in 'zip:level=9' is unknown; known are none,"),
    "spec not canonical: default left out": (make(spec=b"topk:ratio=1/64,bits=2"), "expected its canonical form"),
    "spec not canonical: ratio": (make(spec=b"topk:ratio=2/128,bits=2,chunk=4096"), "expected its canonical form"),
    "an option that went": (make(spec=b"quantize:bits=8,rounding=nearest"), "rounding=nearest' in .*: leave it out"),
    "key without draws": (make(key=1), "key 1, expected 0: topk draws nothing"),
    "payload too small": (make(payload=PAYLOAD[:-1]), f"payload of {len(PAYLOAD) - 1} bytes, expected {len(PAYLOAD)}"),
    "payload too large": (make(payload=PAYLOAD + b"\0"), f"payload of {len(PAYLOAD) + 1} bytes, expected"),
    "payload of another count": (make(numel=NUMEL + 4096), f"expected .* for {NUMEL + 4096} elements"),
    "payload without elements": (make(numel=0), f"payload of {len(PAYLOAD)} bytes, expected 0 for 0 elements"),
    "payload missing": (make(payload=b"", numel=1 << 48), "payload of 0 bytes, expected"),
}


def test_refused() -> None:
    assert issubclass(FrameError, ValueError)
    for data, message in REASONS.values():
        with pytest.raises(FrameError, match=message):
            CompressedTensor.from_bytes(data)
    with pytest.raises(FrameError, match="9000 elements, expected 9001"):  # by a reader who knows the count
        CompressedTensor.from_bytes(GOOD, numel=NUMEL + 1)


def test_a_few_bytes_may_name_a_huge_tensor_but_cost_nothing_to_read() -> None:
    spec = f"topk:ratio=1/{1 << 48},bits=2,chunk=none"
    compressor = thinwire.compressor(spec)
    payload = torch.zeros(compressor.nbytes(1 << 48), dtype=torch.uint8)
    payload[compressor.layout(1 << 48, torch.float32).record.high_at] = 1
    data = build(spec.encode(), payload.numpy().tobytes(), numel=1 << 48)
    assert CompressedTensor.from_bytes(data).to_bytes() == data


def test_the_first_fault_is_the_one_reported() -> None:
    """Everything wrong at once, mended field by field: the checks have an order, so errors are stable."""
    faults = {
        "magic": b"JUNK", "version": 9, "dtype": 9, "numel": 1 << 60, "length": 1 << 60, "crc": 1,
        "spec": b"\xff", "key": 7, "payload": b"x",
    }  # fmt: skip
    good = {
        "magic": b"THNW", "version": 1, "dtype": 1, "numel": NUMEL, "length": 1, "crc": None,
        "spec": SPEC, "key": 0, "payload": PAYLOAD,
    }  # fmt: skip
    expected = ["not a thinwire frame", "version 9", "dtype code 9", "elements", "cut short", "checksum", "not ASCII"]
    for index, message in enumerate([*expected, "key 7", "payload of 1 bytes"]):
        mended = {**faults, **dict(list(good.items())[:index])}
        with pytest.raises(FrameError, match=message):
            CompressedTensor.from_bytes(build(**mended))
