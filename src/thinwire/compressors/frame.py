"""The wire frame: one compressed tensor as self-contained bytes, for files, queues and links without a shared set-up.

    offset  size  field
         0     4  magic, b"THNW"
         4     1  version, 1
         5     1  dtype: 1 float32, 2 float64, 3 float16, 4 bfloat16
         6     2  length of the spec, S
         8     8  element count
        16     8  key of the draw; 0 for a compressor that draws nothing
        24     8  length of the payload, L
        32     4  CRC-32 of all bytes before and after this field
        36     S  spec of the compressor in its canonical form, ASCII, such as topk:ratio=1/64,bits=2,chunk=4096
      36+S     L  payload

All integers are unsigned and little-endian. Reading is strict. The fields are checked in this order, and each kind of
damage has its own error. Any bytes either raise `FrameError` or pack again to the same bytes. This module handles the
fields; `CompressedTensor.from_bytes` checks that spec and payload fit together.
"""

import struct
import zlib
from typing import NamedTuple

MAGIC = b"THNW"
VERSION = 1
DTYPES = {1: "float32", 2: "float64", 3: "float16", 4: "bfloat16"}
MAX_NUMEL = 1 << 48  # Largest element count of a frame. No tensor is larger, so a larger count means damaged bytes

_HEADER = struct.Struct("<4sBBHQQQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size

Buffer = bytes | bytearray | memoryview


class FrameError(ValueError):
    """Raised for bytes that are not a frame that this version of thinwire can read. The message gives the reason."""


class Frame(NamedTuple):
    """The fields of a frame. `pack` and `unpack` are inverse to each other."""

    spec: str
    dtype: str
    numel: int
    key: int
    payload: Buffer


def pack(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    spec = frame.spec.encode("ascii")
    code = next(code for code, name in DTYPES.items() if name == frame.dtype)
    header = _HEADER.pack(MAGIC, VERSION, code, len(spec), frame.numel, frame.key, len(frame.payload))
    return b"".join([header, _checksum(header, spec, frame.payload), spec, frame.payload])


def unpack(data: Buffer) -> Frame:
    """Return the fields of a frame, or raise `FrameError`. The payload is a view of `data`, not a copy."""
    if not isinstance(data, Buffer):
        raise FrameError(f"{type(data).__name__}, expected bytes, bytearray or memoryview")
    view = memoryview(data).cast("B")
    if len(view) < HEADER_BYTES:
        raise FrameError(f"cut short: {len(view)} bytes, expected a header of {HEADER_BYTES}")
    magic, version, code, spec_length, numel, key, length = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise FrameError(f"not a thinwire frame: starts with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"version {version}, expected {VERSION}: write and read with the same release of thinwire")
    if code not in DTYPES:
        raise FrameError(f"dtype code {code}, expected one of {sorted(DTYPES)}")
    if numel > MAX_NUMEL:
        raise FrameError(f"{numel} elements, expected at most {MAX_NUMEL}")
    expected = HEADER_BYTES + spec_length + length
    if len(view) != expected:
        how = "cut short" if len(view) < expected else "too long"
        raise FrameError(f"{how}: {len(view)} bytes, expected {expected} as the header says")
    spec, payload = view[HEADER_BYTES : HEADER_BYTES + spec_length], view[HEADER_BYTES + spec_length :]
    given, computed = view[_HEADER.size : HEADER_BYTES], _checksum(view[: _HEADER.size], spec, payload)
    if given != computed:
        raise FrameError(f"checksum {given.hex()}, expected {computed.hex()}: the bytes were damaged on their way")
    try:
        text = bytes(spec).decode("ascii")
    except UnicodeDecodeError:
        raise FrameError(f"the spec {bytes(spec)!r} is not ASCII") from None
    return Frame(spec=text, dtype=DTYPES[code], numel=numel, key=key, payload=payload)


def _checksum(header: Buffer, spec: Buffer, payload: Buffer) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(spec, zlib.crc32(header))))
