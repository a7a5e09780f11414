"""Every element in the tensor's dtype. Values beyond its range saturate, and a residual keeps the difference."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..layout import DenseLayout, Layout, residual_dtype
from .numbers import check_floats, is_finite

_SEGMENT = 1 << 20
"""Elements of 16-bit floats that are widened at a time, to limit the memory. Other floats are not widened."""


def _segments(layout: DenseLayout, *others: torch.dtype) -> Iterator[slice]:
    step = layout.numel if {layout.dtype} == set(others) else _SEGMENT
    return (slice(start, min(start + step, layout.numel)) for start in range(0, layout.numel, step))


def _bytes(part: slice, layout: DenseLayout) -> slice:
    return slice(part.start * layout.dtype.itemsize, part.stop * layout.dtype.itemsize)


def read_values(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes at any address as numbers: the same memory if it is aligned, else a copy."""
    aligned = payload.storage_offset() % dtype.itemsize == 0 and payload.data_ptr() % dtype.itemsize == 0
    return (payload if aligned else payload.clone()).view(dtype)


def encode(tensor: Tensor, residual: Tensor | None, layout: DenseLayout, payload: Tensor) -> bool:
    """Write tensor + residual to the payload. If the sum is not finite, write the mark and return False."""
    flat, kept = tensor.view(-1), None if residual is None else residual.view(-1)
    wide = residual_dtype(layout.dtype)
    limit = torch.finfo(layout.dtype).max
    for part in _segments(layout, wide):
        target = payload[_bytes(part, layout)]
        values = read_values(target, layout.dtype)
        total = values if layout.dtype == wide else torch.empty(values.shape, dtype=wide, device=values.device)
        total.copy_(flat[part])
        if kept is not None:
            total += kept[part]
        if not is_finite(total):
            mark(layout, payload)
            return False
        if total is not values:
            values.copy_(total.clamp_(-limit, limit))
        if values.data_ptr() != target.data_ptr():
            target.copy_(values.view(torch.uint8))
    return True


def mark(layout: Layout, payload: Tensor) -> None:
    """Write the mark to a payload that consists of values only: every value becomes NaN."""
    count = layout.nbytes // layout.dtype.itemsize
    nan = torch.full((count,), torch.nan, dtype=layout.dtype, device=payload.device)
    payload.copy_(nan.view(torch.uint8))


def commit(tensor: Tensor, residual: Tensor, layout: DenseLayout, payload: Tensor) -> None:
    """Compute residual <- tensor + residual - decode(payload)."""
    flat, kept = tensor.view(-1), residual.view(-1)
    for part in _segments(layout, residual.dtype):
        kept[part].add_(flat[part])
    decode(payload.unsqueeze(0), layout=layout, out=residual, weight=-1.0, add=True)


def decode(payloads: Tensor, layout: DenseLayout, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
    flat = out.view(-1)
    wide = residual_dtype(out.dtype)
    for part in _segments(layout, wide, out.dtype):
        target = flat[part]
        total = target if target.dtype == wide else target.to(wide)
        if not add:
            total.zero_()
        for payload in payloads:
            total.add_(read_values(payload[_bytes(part, layout)], layout.dtype), alpha=weight)
        if total is not target:
            target.copy_(total)


def check(payload: Tensor, layout: Layout) -> None:
    """Raise ValueError for bytes that `encode` could not have written."""
    check_floats(read_values(payload, layout.dtype))
