"""Frames and positions made by hand, right or wrong, without the library's own writer."""

import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from thinwire.kernels.layout import TopKRecord

HEADER = struct.Struct("<4sBBHQQQ")
FIELDS = ("magic", "version", "dtype", "spec_length", "numel", "key", "length")
"""Names of the header's fields, in their order."""


def build(spec: bytes, payload: bytes, *, crc: int | None = None, **header: int | bytes) -> bytes:
    """A frame whose header says what it should, except where `header` says otherwise; the checksum fits anyhow."""
    usual = dict(zip(FIELDS, (b"THNW", 1, 1, len(spec), 0, 0, len(payload)), strict=True))
    packed = HEADER.pack(*({**usual, **header}[name] for name in FIELDS))
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


CHARACTERS = b"0123456789/.,:=-%enotpk\x00\xff"
LIMITS = {
    "version": 1 << 8,
    "dtype": 1 << 8,
    "spec_length": 1 << 16,
    **dict.fromkeys(("numel", "key", "length"), 1 << 64),
}
EDGES = [0, 1, 2, 255, 256, (1 << 16) - 1, 1 << 31, 1 << 32, 1 << 47, 1 << 48, (1 << 48) + 1, 1 << 63, (1 << 64) - 1]
Fields = dict[str, int | bytes]


def forge_header(draw: Random, fields: Fields, spec: bytes, payload: bytes) -> bytes:
    forged, numel = dict(fields), int(fields["numel"])
    near = (numel + 1, numel - 1, 2 * numel, numel + 4096, len(payload), len(payload) + 1, len(spec))
    for name in draw.sample(list(LIMITS), draw.randint(1, 2)):
        forged[name] = draw.choice((draw.choice(EDGES), draw.choice(near), draw.getrandbits(64))) % LIMITS[name]
    if draw.random() < 0.7:
        forged["version"], forged["dtype"] = 1, draw.randint(1, 4)
    return build(spec, payload, **forged)


def forge_payload(draw: Random, fields: Fields, spec: bytes, payload: bytes) -> bytes:
    forged = bytearray(payload)
    for _ in range(draw.randint(1, 4) if forged else 0):
        at = draw.randrange(len(forged))
        forged[at] = draw.choice((0, 0x7F, 0x80, 0xFF, draw.getrandbits(8), forged[at] ^ 1 << draw.randrange(8)))
    return build(spec, bytes(forged), **fields)


def forge_spec(draw: Random, fields: Fields, spec: bytes, payload: bytes) -> bytes:
    forged, at = bytearray(spec), draw.randrange(len(spec))
    forged[at : at + draw.randint(0, 2)] = draw.choices(CHARACTERS, k=draw.randint(0, 2))
    return build(bytes(forged), payload, **fields)


def forge_size(draw: Random, fields: Fields, spec: bytes, payload: bytes) -> bytes:
    """Cut a part of the payload out, and put other bytes in its place, as many or not."""
    start = draw.randint(0, len(payload))
    stop = draw.randint(start, len(payload))
    other = draw.randbytes(stop - start if draw.random() < 0.7 else draw.randrange(40))
    return build(spec, payload[:start] + other + payload[stop:], **fields)


Forge = Callable[[Random, Fields, bytes, bytes], bytes]
FORGERIES: tuple[Forge, ...] = (forge_header, forge_payload, forge_payload, forge_spec, forge_size)
