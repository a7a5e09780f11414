"""Layouts of payloads: pure arithmetic, without data.

A payload of TopK or Quantize is a sequence of *records*. Each record holds consecutive elements and can be decoded
alone. The records of whole chunks are a slice of the payload, so a collective can send a part of a tensor by itself.
Every size follows from the element count, the dtype and the compressor, so ranks never have to exchange sizes.

All numbers are little-endian. Bit fields are filled from the lowest bit of the first byte, and unused bits are zero.
docs/wire-format.md shows each record byte by byte.
"""

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_STRUCT_FORMATS = {torch.float16: "<e", torch.float32: "<f", torch.float64: "<d"}

BLOCKS_PER_RECORD = 16
"""Blocks in a record of Quantize. Their scales are stored together, so that the codes after them stay aligned."""


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic and of the residual: float64 for float64 tensors, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bytes_for(bits: int) -> int:
    """Return the number of bytes that hold `bits` bits."""
    return (bits + 7) // 8


@dataclass(frozen=True)
class Layout(ABC):
    """The layout of a payload for `numel` elements of `dtype`. The class selects the kernel."""

    numel: int
    dtype: torch.dtype
    summable: ClassVar[bool] = False  # Whether a payload is plain numbers of `dtype`, so that payloads can be added up

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the exact size of the payload in bytes."""

    @property
    def granule(self) -> int:
        """Return the elements of one record. Parts of a multiple of it can be encoded alone to the same bytes."""
        return self.numel

    def with_key(self, key: int) -> "Layout":
        """Return the layout for random draws by this key: the same, unless it depends on draws."""
        return self

    @property
    def limit(self) -> float:
        """Return the largest magnitude. Larger ones saturate, because they overflow the dtype or the float32 levels."""
        return min(torch.finfo(self.dtype).max, torch.finfo(torch.float32).max)

    @property
    def leading_float(self) -> torch.dtype:
        """Return the dtype of the float at the start of the payload, which is NaN if the input was not finite."""
        return self.dtype if self.summable else torch.bfloat16

    def is_marked(self, payload: Tensor) -> bool:
        """Return whether a payload of one element or more begins with NaN, because the input was not finite.

        This waits for a GPU. On a CPU it is done for every payload of a step, where torch's own isnan would be slow.
        """
        size = self.leading_float.itemsize
        on_cpu = payload if payload.device.type == "cpu" else payload[:size].cpu()
        leading = on_cpu.numpy()[:size].tobytes()
        if self.leading_float == torch.bfloat16:
            return int.from_bytes(leading, "little") & 0x7FFF > 0x7F80
        return math.isnan(struct.unpack(_STRUCT_FORMATS[self.leading_float], leading)[0])


class Part(NamedTuple):
    """Consecutive records of equal size: their number, their elements in the tensor and their bytes in the payload."""

    rows: int
    elements: slice
    nbytes: slice


class RecordLayout(Layout):
    """The layout of a payload of records."""

    @property
    @abstractmethod
    def groups(self) -> list[tuple[Any, int, int, int]]:
        """Return (record, rows, its elements, its bytes) of the records of equal size, in their order."""

    @property
    def nbytes(self) -> int:
        """Return the exact size of the payload in bytes."""
        return sum(rows * nbytes for _, rows, _, nbytes in self.groups)

    def parts(self, limit: int) -> Iterator[tuple[Any, Part]]:
        """Yield (record, part), each part of at most `limit` elements or of a single record."""
        element = byte = 0
        for record, rows, elements, nbytes in self.groups:
            at_once = max(1, limit // elements)
            for first in range(0, rows, at_once):
                count = min(at_once, rows - first)
                ends = element + count * elements, byte + count * nbytes
                yield record, Part(count, slice(element, ends[0]), slice(byte, ends[1]))
                element, byte = ends


@dataclass(frozen=True)
class DenseLayout(Layout):
    """Every element, in the tensor's own dtype."""

    summable = True

    @property
    def granule(self) -> int:
        return 1

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TopKRecord(NamedTuple):
    """A record of `k` of `n` elements: scales, value codes, then Elias-Fano positions (low bits, then the high bitmap).

    Position x_j, the j-th in ascending order, is split. Its lowest `low_bits` bits are stored as they are. The other
    bits, h, are stored as a one at bit h + j of the bitmap. `topk_record` chooses the split that makes the smallest
    record.
    """

    n: int
    k: int
    bits: int
    low_bits: int
    codes_at: int
    low_at: int
    high_at: int
    nbytes: int


@lru_cache(maxsize=4096)
def topk_record(n: int, k: int, bits: int) -> TopKRecord:
    """Return the smallest record for `k` of `n` elements with values of `bits` bits."""

    def positions(low_bits: int) -> int:
        return bytes_for(k * low_bits) + bytes_for(k + ((n - 1) >> low_bits))

    # Of equal sizes the larger split: a shorter bitmap is quicker to read.
    low_bits = min(range(n.bit_length() + 1), key=lambda low: (positions(low), -low))
    codes_at = {1: 2, 32: 0}.get(bits, 4)
    low_at = codes_at + bytes_for(k * bits)
    high_at = low_at + bytes_for(k * low_bits)
    return TopKRecord(n, k, bits, low_bits, codes_at, low_at, high_at, nbytes=low_at + positions(low_bits))


@dataclass(frozen=True)
class TopKLayout(RecordLayout):
    """`rows` records of one chunk each, then one shorter record for the remaining elements, if any."""

    rows: int
    record: TopKRecord
    tail: TopKRecord | None

    @property
    def granule(self) -> int:
        return self.record.n

    @property
    def groups(self) -> list[tuple[TopKRecord, int, int, int]]:
        """Return (record, rows, its elements, its bytes) for the chunks and for the tail."""
        counted = [(self.record, self.rows)] + ([(self.tail, 1)] if self.tail else [])
        return [(record, rows, record.n, record.nbytes) for record, rows in counted]

    @property
    def leading_float(self) -> torch.dtype:
        """Return float32 for values of 32 bits, else bfloat16."""
        return torch.float32 if self.record.bits == 32 else torch.bfloat16


@dataclass(frozen=True)
class QuantizeLayout(RecordLayout):
    """Records of 16 blocks: 16 bfloat16 scales, then the codes of all elements. The last record may be shorter."""

    bits: int
    block: int

    @property
    def granule(self) -> int:
        return BLOCKS_PER_RECORD * self.block

    def record_nbytes(self, elements: int) -> int:
        return self.scales_nbytes(elements) + bytes_for(elements * self.bits)

    def scales_nbytes(self, elements: int) -> int:
        return 2 * -(-elements // self.block)

    @property
    def groups(self) -> list[tuple[int, int, int, int]]:
        """Return (elements per record, rows, elements per record, its bytes) for full records and for the last one."""
        rows, rest = divmod(self.numel, self.granule)
        counted = [(self.granule, rows)] + ([(rest, 1)] if rest else [])
        return [(elements, rows, elements, self.record_nbytes(elements)) for elements, rows in counted]


@dataclass(frozen=True)
class RandomKLayout(Layout):
    """One value from each of `k` strata, in the tensor's dtype. Positions are not sent, but drawn again from the key.

    The first `numel % k` strata are one element wider than the others, so that the strata cover every element once.
    """

    k: int
    key: int = 0
    summable = True  # all ranks draw by the same key, and so have the same positions

    def with_key(self, key: int) -> "RandomKLayout":
        return replace(self, key=key)

    @property
    def nbytes(self) -> int:
        return self.k * self.dtype.itemsize
