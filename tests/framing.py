"""Frames and positions made by hand, right or wrong, without the library's own writer."""

import struct
import zlib
from collections.abc import Sequence

import numpy as np

from thinwire.kernels.layout import TopKRecord

HEADER = struct.Struct("<4sBBHQQQ")
FIELDS = ("magic", "version", "dtype", "spec_length", "numel", "key", "length")
"""Names of the header's fields, in their order."""


def build(spec: bytes, payload: bytes, *, crc: int | None = None, **header: int | bytes) -> bytes:
    """A frame whose header says what it should, except where `header` says otherwise; the checksum fits anyhow."""
    values: dict[str, int | bytes] = {
        "magic": b"THNW",
        "version": 1,
        "dtype": 1,
        "spec_length": len(spec),
        "numel": 0,
        "key": 0,
        "length": len(payload),
        **header,
    }
    packed = HEADER.pack(*(values[name] for name in FIELDS))
    computed = zlib.crc32(packed + spec + payload) if crc is None else crc
    return packed + struct.pack("<I", computed) + spec + payload


def take_apart(data: bytes) -> tuple[dict[str, int | bytes], bytes, bytes]:
    """(header fields, spec, payload) of a valid frame; `build` puts them together again.

    >>> fields, spec, payload = take_apart(build(b"none", b"abcd", numel=1))
    >>> fields["numel"], spec, payload
    (1, b'none', b'abcd')
    """
    fields = dict(zip(FIELDS, HEADER.unpack_from(data), strict=True))
    start = HEADER.size + 4
    split = start + int(fields.pop("spec_length"))
    fields.pop("length")
    return fields, data[start:split], data[split:]


def pack_bits(values: Sequence[int], width: int) -> bytes:
    """Bit fields, filled from the lowest bit of the first byte.

    >>> pack_bits([1, 2, 3], 4).hex()
    '2103'
    """
    bits = (np.asarray(values, dtype=np.int64)[:, None] >> np.arange(width)) & 1
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def write_positions(positions: Sequence[int], record: TopKRecord) -> bytes:
    """The Elias-Fano code of any positions the record has room for, rising or not, inside it or not."""
    low = pack_bits([position & ((1 << record.low_bits) - 1) for position in positions], record.low_bits)
    bitmap = np.zeros(8 * (record.nbytes - record.high_at), dtype=np.uint8)
    for rank, position in enumerate(positions):
        bitmap[(position >> record.low_bits) + rank] = 1
    return low + np.packbits(bitmap, bitorder="little").tobytes()
