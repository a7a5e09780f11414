"""Every entry in a few bits, with one scale for each block.

Nearest rounding: 8 and 4 bits use even levels up to the block's largest magnitude. 2 bits know {-s, 0, s}, with s the
mean of the magnitudes above 3/4 of their mean, which for a bell curve is the s of least error. 1 bit is the sign times
the mean magnitude. Stochastic rounding is unbiased: 8, 4 and 2 bits go to one of the two next levels, and 1 bit to one
of ± the largest magnitude, at odds that make the mean right; the scale is cut upwards there, so that nothing saturates.
"""

import torch
from torch import Tensor

from ..layout import QuantizeLayout, residual_dtype
from . import numbers

_BATCH_ENTRIES = 1 << 20
"""Records are taken in batches of about this many entries, to bound the memory that unpacked bits need."""


def encode(tensor: Tensor, residual: Tensor | None, layout: QuantizeLayout, key: int, payload: Tensor) -> bool:
    total = numbers.add_residual(tensor, residual)
    if not numbers.is_finite(total):
        mark(layout, payload)
        return False
    for width, (rows, entries, nbytes) in layout.parts(_BATCH_ENTRIES):
        values = _blocks(total[entries].clamp(-layout.limit, layout.limit).view(rows, width), layout.block)
        scales = to_scales(values, layout)
        step = numbers.from_bfloat16_bits(scales)
        if layout.stochastic:
            start = torch.arange(entries.start, entries.stop, device=tensor.device).view(rows, width)
            codes = _codes_stochastic(values, step, layout.bits, _uniform(key, _blocks(start, layout.block)))
        else:
            codes = _codes_nearest(values, step, layout.bits)
        codes = codes.view(rows, -1)[:, :width]
        payload[nbytes] = torch.cat(
            [numbers.pack(scales.view(rows, -1), 16), numbers.pack(codes, layout.bits)], 1
        ).view(-1)
    return True


def mark(layout: QuantizeLayout, payload: Tensor) -> None:
    """The payload of an input that was not finite: every scale NaN, every code zero."""
    for width, (rows, _, nbytes) in layout.parts(_BATCH_ENTRIES):
        record = payload[nbytes].view(rows, -1)
        record.zero_()
        scales = torch.full((rows, layout.scales_nbytes(width) // 2), numbers.MARK, device=payload.device)
        record[:, : layout.scales_nbytes(width)] = numbers.pack(scales, 16)


def commit(tensor: Tensor, residual: Tensor, layout: QuantizeLayout, key: int, payload: Tensor) -> None:
    residual.add_(tensor)
    decode(payload.unsqueeze(0), layout, key, residual, -1.0, True)


def decode(payloads: Tensor, layout: QuantizeLayout, key: int, out: Tensor, weight: float, add: bool) -> None:
    flat = out.view(-1)
    for width, (rows, entries, nbytes) in layout.parts(_BATCH_ENTRIES):
        total = flat[entries].to(residual_dtype(out.dtype))
        if not add:
            total = torch.zeros_like(total)
        for payload in payloads:
            scales, codes = _unpack(payload[nbytes].view(rows, -1), layout, width)
            values = _levels(_blocks(codes, layout.block), layout.bits, numbers.from_bfloat16_bits(scales))
            total = total + values.reshape(rows, -1)[:, :width].reshape(-1).to(total.dtype) * weight
        flat[entries] = total.to(flat.dtype)


def check(payload: Tensor, layout: QuantizeLayout) -> None:
    scales = []
    for width, (rows, _, nbytes) in layout.parts(_BATCH_ENTRIES):
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
    """One bfloat16 scale, as bits, for each block in the last dimension. NaN stands for "no entry" in a short block."""
    magnitudes = values.abs().nan_to_num(0.0)
    present = ~torch.isnan(values)
    largest = magnitudes.amax(-1)
    if layout.stochastic:
        return _scale_upwards(largest, layout)
    if layout.bits > 2:
        return numbers.to_bfloat16_bits(largest / _top(layout.bits))
    mean = numbers.mean_of(magnitudes, present)
    if layout.bits == 1:
        return numbers.to_bfloat16_bits(mean)
    threshold = (0.75 * mean).to(magnitudes.dtype).unsqueeze(-1)
    return numbers.to_bfloat16_bits(numbers.mean_of(magnitudes, present & (magnitudes > threshold)))


def _scale_upwards(largest: Tensor, layout: QuantizeLayout) -> Tensor:
    """The smallest scale with which the largest entry has a level, unless that level would overflow the dtype."""
    top = _top(layout.bits)
    down = numbers.to_bfloat16_bits(largest / top)
    reach = numbers.from_bfloat16_bits(down).to(largest.dtype) * top
    up = (down + 1).clamp(min=numbers.SMALLEST_SCALE)
    fits = numbers.from_bfloat16_bits(up).to(largest.dtype) * top <= layout.limit
    return torch.where((reach < largest) & fits, up, down)


def _top(bits: int) -> int:
    """The index of the highest level; 1-bit values have a single magnitude."""
    return max(1, (1 << (bits - 1)) - 1)


def _codes_nearest(values: Tensor, step: Tensor, bits: int) -> Tensor:
    if bits == 1:
        return numbers.sign_bit(values, bits)
    index = numbers.nearest_level(values.abs().nan_to_num(0.0), torch.zeros_like(step), step, _top(bits) + 1)
    return index | numbers.sign_bit(values, bits)


def _codes_stochastic(values: Tensor, step: Tensor, bits: int, uniform: Tensor) -> Tensor:
    """`uniform` in [0, 1): a value at share f of the way between two levels goes to the upper one if uniform < f."""
    ratio = values.nan_to_num(0.0) * numbers.inverse(step, values.dtype).unsqueeze(-1)
    if bits == 1:
        return (uniform >= (ratio.clamp(-1, 1) + 1) / 2).to(torch.int64)
    magnitude = ratio.abs().clamp(max=_top(bits))
    index = magnitude.floor()
    index = index + (uniform < magnitude - index)
    return index.to(torch.int64) | numbers.sign_bit(values, bits)


def _uniform(key: int, positions: Tensor) -> Tensor:
    """15 random bits for each entry, four entries to a draw."""
    bits = numbers.draw(key, positions >> 2) >> (15 * (positions & 3))
    return ((bits & 0x7FFF).to(torch.float32) + 0.5) / 32768


def _levels(codes: Tensor, bits: int, step: Tensor) -> Tensor:
    if bits == 1:
        return numbers.signed_levels(codes, bits, step, torch.zeros_like(step))
    return numbers.signed_levels(codes, bits, torch.zeros_like(step), step)


def _blocks(rows: Tensor, block: int) -> Tensor:
    """[rows, entries] -> [rows, blocks, block]; a short last block is filled up with NaN (integers: 0)."""
    missing = -rows.shape[1] % block
    filler = torch.nan if rows.is_floating_point() else 0
    return torch.nn.functional.pad(rows, (0, missing), value=filler).view(rows.shape[0], -1, block)


def _unpack(packed: Tensor, layout: QuantizeLayout, width: int) -> tuple[Tensor, Tensor]:
    split = layout.scales_nbytes(width)
    return numbers.unpack(packed[:, :split], 16, split // 2), numbers.unpack(packed[:, split:], layout.bits, width)
