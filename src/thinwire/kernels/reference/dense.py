"""Every entry in the tensor's dtype; what does not fit that dtype saturates, and with a residual the rest is kept."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..layout import DenseLayout, residual_dtype
from .numbers import check_floats, is_finite

_SEGMENT = 1 << 18
"""Entries at a time, so that the working memory is small and stays in the cache."""


def _segments(numel: int) -> Iterator[slice]:
    return (slice(start, min(start + _SEGMENT, numel)) for start in range(0, numel, _SEGMENT))


def _bytes(part: slice, layout: DenseLayout) -> slice:
    return slice(part.start * layout.dtype.itemsize, part.stop * layout.dtype.itemsize)


def to_wire(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite numbers -> finite numbers of `dtype`."""
    limit = torch.finfo(dtype).max
    return values if values.dtype == dtype else values.clamp(-limit, limit).to(dtype)


def read_values(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes at any address -> numbers."""
    aligned = payload if payload.data_ptr() % dtype.itemsize == 0 else payload.clone()
    return aligned.view(dtype)


def encode(tensor: Tensor, residual: Tensor | None, layout: DenseLayout, key: int, payload: Tensor) -> bool:
    flat, kept = tensor.view(-1), None if residual is None else residual.view(-1)
    for part in _segments(layout.numel):
        total = flat[part].to(residual_dtype(layout.dtype))
        if kept is not None:
            total = total + kept[part]
        if not is_finite(total):
            mark = torch.full((layout.numel,), torch.nan, dtype=layout.dtype, device=tensor.device)
            payload.copy_(mark.view(torch.uint8))
            return False
        payload[_bytes(part, layout)] = to_wire(total, layout.dtype).view(torch.uint8)
    return True


def commit(tensor: Tensor, residual: Tensor, layout: DenseLayout, key: int, payload: Tensor) -> None:
    flat, kept = tensor.view(-1), residual.view(-1)
    for part in _segments(layout.numel):
        kept[part] += flat[part]
        kept[part] -= read_values(payload[_bytes(part, layout)], layout.dtype)


def decode(payloads: Tensor, layout: DenseLayout, key: int, out: Tensor, weight: float, add: bool) -> None:
    flat = out.view(-1)
    for part in _segments(layout.numel):
        total = flat[part].to(residual_dtype(out.dtype))
        if not add:
            total = torch.zeros_like(total)
        for payload in payloads:
            values = read_values(payload[_bytes(part, layout)], layout.dtype).to(total.dtype)
            total = total + (values if weight == 1 else values * weight)
        flat[part] = total


def check(payload: Tensor, layout: DenseLayout) -> None:
    check_floats(read_values(payload, layout.dtype))
