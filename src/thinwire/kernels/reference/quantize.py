"""Every element in a few bits, with one scale for each block.

8 and 4 bits are the nearest of evenly spaced levels up to the largest magnitude of the block. 2 bits use {-s, 0, s},
where s is the mean of the magnitudes above 3/4 of the mean magnitude; for a normal distribution this s has the least
error. 1 bit is the sign times the mean magnitude.
"""

import torch
from torch import Tensor

from ..layout import QuantizeLayout, residual_dtype
from . import numbers

_BATCH_ELEMENTS = 1 << 20
"""Approximate number of elements in a batch of records. Batches limit the memory of unpacked bits."""


def encode(tensor: Tensor, residual: Tensor | None, layout: QuantizeLayout, payload: Tensor) -> bool:
    """Write the payload of tensor + residual. If the sum is not finite, write the mark and return False."""
    total = numbers.add_residual(tensor, residual)
    if not numbers.is_finite(total):
        mark(layout, payload)
        return False
    for width, (rows, elements, nbytes) in layout.parts(_BATCH_ELEMENTS):
        values = _blocks(total[elements].clamp(-layout.limit, layout.limit).view(rows, width), layout.block)
        scales = to_scales(values, layout)
        step = numbers.from_bfloat16_bits(scales)
        codes = _codes(values, step, layout.bits).view(rows, -1)[:, :width]
        payload[nbytes] = torch.cat(
            [numbers.pack(scales.view(rows, -1), 16), numbers.pack(codes, layout.bits)], 1
        ).view(-1)
    return True


def mark(layout: QuantizeLayout, payload: Tensor) -> None:
    """Write the mark: every scale is NaN, every code zero."""
    for width, (rows, _, nbytes) in layout.parts(_BATCH_ELEMENTS):
        record = payload[nbytes].view(rows, -1)
        record.zero_()
        scales = torch.full((rows, layout.scales_nbytes(width) // 2), numbers.MARK, device=payload.device)
        record[:, : layout.scales_nbytes(width)] = numbers.pack(scales, 16)


def commit(tensor: Tensor, residual: Tensor, layout: QuantizeLayout, payload: Tensor) -> None:
    """Compute residual <- tensor + residual - decode(payload)."""
    residual.add_(tensor)
    decode(payload.unsqueeze(0), layout=layout, out=residual, weight=-1.0, add=True)


def decode(payloads: Tensor, layout: QuantizeLayout, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
    flat = out.view(-1)
    for width, (rows, elements, nbytes) in layout.parts(_BATCH_ELEMENTS):
        total = flat[elements].to(residual_dtype(out.dtype))
        if not add:
            total = torch.zeros_like(total)
        for payload in payloads:
            scales, codes = _unpack(payload[nbytes].view(rows, -1), layout, width)
            values = _levels(_blocks(codes, layout.block), layout.bits, numbers.from_bfloat16_bits(scales))
            total = total + values.reshape(rows, -1)[:, :width].reshape(-1).to(total.dtype) * weight
        flat[elements] = total.to(flat.dtype)


def check(payload: Tensor, layout: QuantizeLayout) -> None:
    """Raise ValueError for bytes that `encode` could not have written."""
    scales = []
    for width, (rows, _, nbytes) in layout.parts(_BATCH_ELEMENTS):
        packed = payload[nbytes].view(rows, -1)
        scales.append(_unpack(packed, layout, width)[0].reshape(-1))
        numbers.check_padding(packed[:, layout.scales_nbytes(width) :], width * layout.bits)
    every = torch.cat(scales)
    numbers.check_scales(every)
    if bool((every != numbers.MARK).all()) and not numbers.is_finite(
        numbers.from_bfloat16_bits(every) * _top(layout.bits)
    ):
        raise ValueError("a level overflows float32")


def to_scales(values: Tensor, layout: QuantizeLayout) -> Tensor:
    """Return one bfloat16 scale, as bits, for each block in the last dimension. Short blocks are padded with NaN."""
    magnitudes = values.abs().nan_to_num(0.0)
    present = ~torch.isnan(values)
    largest = magnitudes.amax(-1)
    if layout.bits > 2:
        return numbers.to_bfloat16_bits(numbers.divided(largest, _top(layout.bits)))
    mean = numbers.mean_of(magnitudes, present)
    if layout.bits == 1:
        return numbers.to_bfloat16_bits(mean)
    threshold = (0.75 * mean).to(magnitudes.dtype).unsqueeze(-1)
    return numbers.to_bfloat16_bits(numbers.mean_of(magnitudes, present & (magnitudes > threshold)))


def _top(bits: int) -> int:
    """Return the index of the highest level, or 1 for 1-bit values, which have a single magnitude."""
    return max(1, (1 << (bits - 1)) - 1)


def _codes(values: Tensor, step: Tensor, bits: int) -> Tensor:
    if bits == 1:
        return numbers.sign_bit(values, bits)
    index = numbers.nearest_level(
        values.abs().nan_to_num(0.0), low=torch.zeros_like(step), step=step, levels=_top(bits) + 1
    )
    return index | numbers.sign_bit(values, bits)


def _levels(codes: Tensor, bits: int, step: Tensor) -> Tensor:
    if bits == 1:
        return numbers.signed_levels(codes, bits=bits, low=step, step=torch.zeros_like(step))
    return numbers.signed_levels(codes, bits=bits, low=torch.zeros_like(step), step=step)


def _blocks(rows: Tensor, block: int) -> Tensor:
    """Reshape [rows, elements] to [rows, blocks, block]. A short last block is padded with NaN (integers: 0)."""
    missing = -rows.shape[1] % block
    filler = torch.nan if rows.is_floating_point() else 0
    return torch.nn.functional.pad(rows, (0, missing), value=filler).view(rows.shape[0], -1, block)


def _unpack(packed: Tensor, layout: QuantizeLayout, width: int) -> tuple[Tensor, Tensor]:
    split = layout.scales_nbytes(width)
    return numbers.unpack(packed[:, :split], 16, split // 2), numbers.unpack(packed[:, split:], layout.bits, width)
