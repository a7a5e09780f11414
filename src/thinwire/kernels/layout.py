"""Where everything lies in a payload: pure arithmetic, no data.

A payload of TopK or Quantize is a row of *records*, each of which holds a run of consecutive entries and stands alone:
the records of whole chunks are a slice of the payload, so a collective can send a share of a tensor by itself.
Every size follows from the element count, the dtype and the compressor, so ranks never have to exchange sizes.

All numbers are little-endian; bit fields are filled from the lowest bit of the first byte; bits left over are zero.
docs/wire-format.md shows each record byte by byte.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

BLOCKS_PER_RECORD = 16
"""Quantize: scales of this many blocks stand together, so that the codes behind them stay aligned."""


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic, and so of the residual: float64 for float64 tensors, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bytes_for(bits: int) -> int:
    return (bits + 7) // 8


@dataclass(frozen=True)
class Layout(ABC):
    """A payload for `numel` entries of `dtype`. Its class says which kernel reads it, its fields how."""

    numel: int
    dtype: torch.dtype

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Exact size of the payload."""

    @property
    def granule(self) -> int:
        """Entries of one record: cut at a multiple of it, each part can be encoded by itself to the same bytes."""
        return self.numel

    @property
    def summable(self) -> bool:
        """Whether a payload is plain numbers of `dtype`, so that those of ranks with the same key can be added up."""
        return False

    @property
    def limit(self) -> float:
        """Larger magnitudes saturate: they would overflow the tensor's dtype, or the float32 of the levels."""
        return min(torch.finfo(self.dtype).max, torch.finfo(torch.float32).max)

    @property
    def leading_float(self) -> torch.dtype:
        """Every payload starts with a float of this dtype, which is NaN if the input was not finite."""
        return torch.bfloat16


class Part(NamedTuple):
    """A run of `rows` records of equal size: which entries of the tensor, which bytes of the payload."""

    rows: int
    entries: slice
    nbytes: slice


def _parts(rows: int, entries: int, nbytes: int, limit: int) -> Iterator[Part]:
    """Cut `rows` records of this many entries and bytes each into runs of at most `limit` entries, or one record."""
    at_once = max(1, limit // entries)
    for first in range(0, rows, at_once):
        stop = min(first + at_once, rows)
        yield Part(stop - first, slice(first * entries, stop * entries), slice(first * nbytes, stop * nbytes))


@dataclass(frozen=True)
class DenseLayout(Layout):
    """Every entry, in the tensor's own dtype."""

    @property
    def granule(self) -> int:
        return 1

    @property
    def summable(self) -> bool:
        return True

    @property
    def leading_float(self) -> torch.dtype:
        return self.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TopKRecord(NamedTuple):
    """`k` of `n` entries: scales, then value codes, then Elias-Fano positions (low bits, then the high bitmap).

    Position x_j, the j-th in rising order, is split: its lowest `low_bits` bits are stored as they are, and the rest h
    as a one at bit h + j of the bitmap. The split that makes the smallest record is taken.
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
    def positions(low_bits: int) -> int:
        return bytes_for(k * low_bits) + bytes_for(k + ((n - 1) >> low_bits))

    # Of equal sizes the larger split: a shorter bitmap is quicker to read.
    low_bits = min(range(n.bit_length() + 1), key=lambda low: (positions(low), -low))
    codes_at = {1: 2, 32: 0}.get(bits, 4)
    low_at = codes_at + bytes_for(k * bits)
    high_at = low_at + bytes_for(k * low_bits)
    return TopKRecord(
        n, k, bits, low_bits, codes_at, low_at, high_at, codes_at + bytes_for(k * bits) + positions(low_bits)
    )


@dataclass(frozen=True)
class TopKLayout(Layout):
    """`rows` records of `chunk` entries, then one shorter record for the rest, if any."""

    rows: int
    record: TopKRecord
    tail: TopKRecord | None

    @property
    def granule(self) -> int:
        return self.record.n

    @property
    def nbytes(self) -> int:
        return self.rows * self.record.nbytes + (self.tail.nbytes if self.tail else 0)

    def parts(self, limit: int) -> Iterator[tuple[TopKRecord, Part]]:
        """Runs of records of one kind, each of at most about `limit` entries."""
        full = _parts(self.rows, self.record.n, self.record.nbytes, limit)
        yield from ((self.record, part) for part in full)
        if self.tail:
            end = self.rows * self.record.n, self.rows * self.record.nbytes
            yield self.tail, Part(1, slice(end[0], self.numel), slice(end[1], self.nbytes))

    @property
    def leading_float(self) -> torch.dtype:
        return torch.float32 if self.record.bits == 32 else torch.bfloat16


@dataclass(frozen=True)
class QuantizeLayout(Layout):
    """Records of 16 blocks: 16 bfloat16 scales, then the codes of all their entries. The last record may be shorter."""

    bits: int
    block: int
    stochastic: bool

    @property
    def granule(self) -> int:
        return self.record_entries

    @property
    def record_entries(self) -> int:
        return BLOCKS_PER_RECORD * self.block

    def record_nbytes(self, entries: int) -> int:
        return self.scales_nbytes(entries) + bytes_for(entries * self.bits)

    def scales_nbytes(self, entries: int) -> int:
        return 2 * -(-entries // self.block)

    @property
    def nbytes(self) -> int:
        rows, rest = divmod(self.numel, self.record_entries)
        return rows * self.record_nbytes(self.record_entries) + (self.record_nbytes(rest) if rest else 0)

    def parts(self, limit: int) -> Iterator[tuple[int, Part]]:
        """(entries per record, part): runs of records of one kind, each of at most about `limit` entries."""
        rows, rest = divmod(self.numel, self.record_entries)
        full = _parts(rows, self.record_entries, self.record_nbytes(self.record_entries), limit)
        yield from ((self.record_entries, part) for part in full)
        if rest:
            yield (
                rest,
                Part(
                    1, slice(self.numel - rest, self.numel), slice(self.nbytes - self.record_nbytes(rest), self.nbytes)
                ),
            )


@dataclass(frozen=True)
class RandomKLayout(Layout):
    """One value out of each of `k` strata, in the tensor's dtype. Positions are drawn again from the key, never sent.

    The first `numel % k` strata are one entry wider than the others, so that together they cover every entry once.
    """

    k: int

    @property
    def summable(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self.k * self.dtype.itemsize

    @property
    def leading_float(self) -> torch.dtype:
        return self.dtype
