"""Naive answers to compare with, and a reader of payloads that shares no code with the kernels.

Written from the text of docs/wire-format.md and `kernels/layout.py` alone: bit fields are filled from the lowest bit of
the first byte, scales are the upper half of a float32, positions are Elias-Fano.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.layout import QuantizeLayout, TopKLayout, TopKRecord


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, except that a NaN is a NaN.

    >>> same_bits(torch.tensor([0.0, torch.nan]), torch.tensor([-0.0, torch.nan]))
    False
    """
    nan = a.isnan()
    if not torch.equal(nan, b.isnan()) or a.dtype != b.dtype:
        return False
    return bytes_of(a.where(~nan, 0)) == bytes_of(b.where(~nan, 0))


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def topk_positions(came_in: Tensor, layout: TopKLayout) -> list[int]:
    """Where the k largest elements of each chunk are, in rising order; of equal ones the first."""
    magnitudes, found = came_in.abs().numpy(), []
    for start, record, rows in ((0, layout.record, layout.rows), (layout.rows * layout.record.n, layout.tail, 1)):
        if record is not None and rows:
            chunks = magnitudes[start : start + rows * record.n].reshape(rows, record.n)
            order = np.argsort(-chunks, axis=1, kind="stable")[:, : record.k]
            found += (start + record.n * np.arange(rows)[:, None] + np.sort(order, axis=1)).ravel().tolist()
    return found


def fields(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """Rows of bytes -> rows of `count` unsigned numbers of `width` bits."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")[:, : count * width].astype(np.int64)
    return (bits.reshape(len(packed), count, width) << np.arange(width)).sum(-1)


class Record(NamedTuple):
    """Rows of records of one shape, taken apart; `scales` is None where values are float32."""

    scales: np.ndarray | None
    codes: np.ndarray
    positions: np.ndarray


def read_topk(payload: Tensor, layout: TopKLayout) -> list[Record]:
    """The full records, then the tail; positions count from the start of the tensor."""
    raw, found, at, start = payload.numpy(), [], 0, 0
    for record, count in ((layout.record, layout.rows), (layout.tail, 1)):
        if record is None or not count:
            continue
        packed = raw[at : at + count * record.nbytes].reshape(count, record.nbytes)
        offset = start + record.n * np.arange(count)[:, None]
        scales = fields(packed[:, : record.codes_at], 16, record.codes_at // 2) if record.bits < 32 else None
        codes = fields(packed[:, record.codes_at : record.low_at], record.bits, record.k)
        found.append(Record(scales, codes, offset + read_positions(packed, record)))
        at, start = at + packed.size, start + count * record.n
    assert at == len(raw)
    assert start == layout.numel
    return found


def read_positions(packed: np.ndarray, record: TopKRecord) -> np.ndarray:
    low = fields(packed[:, record.low_at : record.high_at], record.low_bits, record.k)
    bitmap = np.unpackbits(packed[:, record.high_at :], axis=1, bitorder="little")
    high = bitmap.nonzero()[1].reshape(len(packed), record.k) - np.arange(record.k)
    return (high << record.low_bits) | low


def read_quantize(payload: Tensor, layout: QuantizeLayout) -> list[Record]:
    """Record by record."""
    raw, found, at = payload.numpy(), [], 0
    for start in range(0, layout.numel, layout.granule):
        elements = min(layout.granule, layout.numel - start)
        split, size = layout.scales_nbytes(elements), layout.record_nbytes(elements)
        packed = raw[at : at + size].reshape(1, size)
        scales = fields(packed[:, :split], 16, split // 2)
        found.append(Record(scales, fields(packed[:, split:], layout.bits, elements), np.empty((1, 0))))
        at += size
    assert at == len(raw)
    return found
