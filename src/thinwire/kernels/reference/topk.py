"""The k largest entries of each chunk, by magnitude; of equal ones the lowest position.

Values: 32 bits as they are (float32); 1 bit as the sign and the chunk's mean magnitude; 2 bits as the sign and one of
two levels, the mean of what lies below the mean and the mean of the rest; 4, 8 and 16 bits as the sign and one of
2^(bits-1) even levels from the smallest kept magnitude to the largest. Positions: Elias-Fano (`TopKRecord`).
"""

import torch
from torch import Tensor

from ..layout import TopKLayout, TopKRecord
from . import numbers

_BATCH_ENTRIES = 1 << 22
"""Records are taken in batches of about this many entries, to bound the memory that masks and sums need."""


def encode(tensor: Tensor, residual: Tensor | None, layout: TopKLayout, key: int, payload: Tensor) -> bool:
    total = numbers.add_residual(tensor, residual)
    if not numbers.is_finite(total):
        mark(layout, payload)
        return False
    for record, (rows, entries, nbytes) in layout.parts(_BATCH_ENTRIES):
        chunk = total[entries].view(rows, record.n)
        positions = select(chunk.abs(), record.k)
        values = chunk.gather(1, positions).clamp(-layout.limit, layout.limit)
        payload[nbytes] = pack_record(positions, values, record).view(-1)
    return True


def mark(layout: TopKLayout, payload: Tensor) -> None:
    """The payload of an input that was not finite: the first k positions, all NaN."""
    for record, (rows, _, nbytes) in layout.parts(_BATCH_ENTRIES):
        positions = torch.arange(record.k, device=payload.device).expand(rows, record.k)
        values = torch.full((rows, record.k), torch.nan, device=payload.device)
        payload[nbytes] = pack_record(positions, values, record).view(-1)


def commit(tensor: Tensor, residual: Tensor, layout: TopKLayout, key: int, payload: Tensor) -> None:
    residual.add_(tensor)
    decode(payload.unsqueeze(0), layout, key, residual, -1.0, True)


def decode(payloads: Tensor, layout: TopKLayout, key: int, out: Tensor, weight: float, add: bool) -> None:
    flat = out.view(-1)
    for record, (rows, entries, nbytes) in layout.parts(_BATCH_ENTRIES):
        part = flat[entries].view(rows, record.n)
        total = part.to(torch.float32) if out.dtype.itemsize == 2 else part
        if not add:
            total.zero_()
        for payload in payloads:
            positions, values = unpack_record(payload[nbytes].view(rows, record.nbytes), record)
            outside = positions >= record.n  # passed over: these bytes may not have been checked
            values = torch.where(outside, 0, values.to(total.dtype) * weight)
            _add_at(total, torch.where(outside, 0, positions), values)
        if total is not part:
            part.copy_(total)


def _add_at(total: Tensor, positions: Tensor, values: Tensor) -> None:
    """CUDA adds by atomics, which take denormal float32 for 0; in float64 they are none, and sums round the same."""
    if total.is_cuda and total.dtype == torch.float32:
        total.copy_(total.double().scatter_add_(1, positions, values.double()))
    else:
        total.scatter_add_(1, positions, values)


def check(payload: Tensor, layout: TopKLayout) -> None:
    scales, values = [], []
    for record, (rows, _, nbytes) in layout.parts(_BATCH_ENTRIES):
        packed = payload[nbytes].view(rows, record.nbytes)
        values.append(check_record(packed, record).view(-1))
        if record.bits < 32:
            scales.append(numbers.unpack(packed[:, : record.codes_at], 16, record.codes_at // 2).view(-1))
    if scales:
        numbers.check_scales(torch.cat(scales))
    numbers.check_floats(torch.cat(values))


def select(magnitudes: Tensor, k: int) -> Tensor:
    """Rising positions of the k largest of each row, ties to the lowest position."""
    threshold = magnitudes.topk(k, dim=1).values[:, -1:]
    above, ties = magnitudes > threshold, magnitudes == threshold
    wanted = k - above.sum(1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(1) <= wanted))
    return chosen.nonzero()[:, 1].view(-1, k)


# Values -------------------------------------------------------------------------------------------------------------


def quantize(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(scales as bfloat16 bits, codes) for rows of finite values at 1, 2, 4, 8 or 16 bits."""
    magnitudes = values.abs()
    everything = torch.ones_like(magnitudes, dtype=torch.bool)
    mean = numbers.to_bfloat16_bits(numbers.mean_of(magnitudes, everything))
    if bits == 1:
        scales, index = mean.unsqueeze(-1), torch.zeros_like(values, dtype=torch.int64)
    elif bits == 2:
        large = magnitudes >= numbers.from_bfloat16_bits(mean).unsqueeze(-1)
        low = numbers.to_bfloat16_bits(numbers.mean_of(magnitudes, ~large))
        rise = (numbers.mean_of(magnitudes, large) - numbers.from_bfloat16_bits(low)).clamp(min=0)
        scales, index = torch.stack([low, numbers.to_bfloat16_bits(rise)], 1), large.to(torch.int64)
    else:
        levels = 1 << (bits - 1)
        low = numbers.to_bfloat16_bits(magnitudes.amin(1))
        low_value = numbers.from_bfloat16_bits(low)
        step = numbers.to_bfloat16_bits((magnitudes.amax(1) - low_value) / (levels - 1))
        index = numbers.nearest_level(magnitudes, low_value, numbers.from_bfloat16_bits(step), levels)
        scales = torch.stack([low, step], 1)
    return scales, index | numbers.sign_bit(values, bits)


def dequantize(scales: Tensor, codes: Tensor, bits: int) -> Tensor:
    low = numbers.from_bfloat16_bits(scales[:, 0])
    step = numbers.from_bfloat16_bits(scales[:, -1]) if bits > 1 else torch.zeros_like(low)
    return numbers.signed_levels(codes, bits, low, step)


# Records ------------------------------------------------------------------------------------------------------------


def pack_record(positions: Tensor, values: Tensor, record: TopKRecord) -> Tensor:
    """Rows of k rising positions and their values -> rows of bytes."""
    if record.bits == 32:
        parts = [values.to(torch.float32).contiguous().view(torch.uint8)]
    else:
        if torch.isnan(values).any():
            scales = torch.full((values.shape[0], record.codes_at // 2), numbers.MARK, device=values.device)
            codes = torch.zeros_like(positions)
        else:
            scales, codes = quantize(values, record.bits)
        parts = [numbers.pack(scales, 16), numbers.pack(codes, record.bits)]
    low = positions & ((1 << record.low_bits) - 1)
    high = (positions >> record.low_bits) + torch.arange(record.k, device=positions.device)
    bitmap = torch.zeros(
        positions.shape[0], record.k + ((record.n - 1) >> record.low_bits), dtype=torch.int64, device=positions.device
    ).scatter_(1, high, 1)
    return torch.cat([*parts, numbers.pack(low, record.low_bits), numbers.pack(bitmap, 1)], 1)


def unpack_record(packed: Tensor, record: TopKRecord) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_record`. Bytes that it cannot have made give positions outside the record, or fewer ones."""
    codes = packed[:, record.codes_at : record.low_at]
    if record.bits == 32:
        values = codes.reshape(-1).clone().view(torch.float32).view(-1, record.k)
    else:
        scales = numbers.unpack(packed[:, : record.codes_at], 16, record.codes_at // 2)
        values = dequantize(scales, numbers.unpack(codes, record.bits, record.k), record.bits)
    low = numbers.unpack(packed[:, record.low_at : record.high_at], record.low_bits, record.k)
    # A stable sort puts the places of the ones first, in their order, whatever their number.
    bitmap, places = numbers.unpack_bits(packed[:, record.high_at :]).sort(dim=1, descending=True, stable=True)
    high = places[:, : record.k] - torch.arange(record.k, device=packed.device)
    positions = (high << record.low_bits) | low
    return torch.where(bitmap[:, : record.k] == 1, positions, record.n), values


def check_record(packed: Tensor, record: TopKRecord) -> Tensor:
    """Exactly k positions, strictly rising, all below n, and nothing in the padding; returns the values."""
    bitmap = numbers.unpack_bits(packed[:, record.high_at :])
    if bool((bitmap.sum(1) != record.k).any()):
        raise ValueError(f"a record does not hold {record.k} positions")
    numbers.check_padding(packed[:, record.low_at : record.high_at], record.k * record.low_bits)
    numbers.check_padding(packed[:, record.high_at :], record.k + ((record.n - 1) >> record.low_bits))
    positions, values = unpack_record(packed, record)
    if bool((positions[:, 1:] <= positions[:, :-1]).any()):
        raise ValueError("positions do not rise")
    if bool((positions[:, -1] >= record.n).any()):
        raise ValueError(f"a position is outside its chunk of {record.n} entries")
    numbers.check_padding(packed[:, record.codes_at : record.low_at], record.k * record.bits)
    return values
