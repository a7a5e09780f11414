"""The k elements of largest magnitude in each chunk; of equal magnitudes, the lowest position.

All devices compute the same bits, also for the chunks that no other backend has a kernel for.

Values of 32 bits are float32. 1 bit is the sign, times the mean of the kept magnitudes. 2 bits are the sign and one of
two levels: the mean of the magnitudes below that mean, and the mean of the others. 4, 8 and 16 bits are the sign and
one of 2^(bits-1) evenly spaced levels from the smallest kept magnitude to the largest. Positions are stored in
Elias-Fano form (`TopKRecord`).
"""

import torch
from torch import Tensor

from ..layout import TopKLayout, TopKRecord
from . import numbers

_BATCH_ELEMENTS = 1 << 22
"""Approximate number of elements in a batch of records. Batches limit the memory of masks and sums."""


def encode(tensor: Tensor, residual: Tensor | None, layout: TopKLayout, payload: Tensor) -> bool:
    """Write the payload of tensor + residual. If the sum is not finite, write the mark and return False."""
    total = numbers.add_residual(tensor, residual)
    if not numbers.is_finite(total):
        mark(layout, payload)
        return False
    for record, (rows, elements, nbytes) in layout.parts(_BATCH_ELEMENTS):
        chunk = total[elements].view(rows, record.n)
        positions = select(chunk.abs(), record.k)
        values = chunk.gather(1, positions).clamp(-layout.limit, layout.limit)
        payload[nbytes] = pack_record(positions, values, record).view(-1)
    return True


def mark(layout: TopKLayout, payload: Tensor) -> None:
    """Write the mark: the first k positions of each record, with the value NaN."""
    for record, (rows, _, nbytes) in layout.parts(_BATCH_ELEMENTS):
        positions = torch.arange(record.k, device=payload.device).expand(rows, record.k)
        values = torch.full((rows, record.k), torch.nan, device=payload.device)
        payload[nbytes] = pack_record(positions, values, record, is_marked=True).view(-1)


def commit(tensor: Tensor, residual: Tensor, layout: TopKLayout, payload: Tensor) -> None:
    """Compute residual <- tensor + residual - decode(payload)."""
    residual.add_(tensor)
    decode(payload.unsqueeze(0), layout=layout, out=residual, weight=-1.0, add=True)


def decode(payloads: Tensor, layout: TopKLayout, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
    flat = out.view(-1)
    for record, (rows, elements, nbytes) in layout.parts(_BATCH_ELEMENTS):
        part = flat[elements].view(rows, record.n)
        total = part.to(torch.float32) if out.dtype.itemsize == 2 else part
        if not add:
            total.zero_()
        for payload in payloads:
            positions, values = unpack_record(payload[nbytes].view(rows, record.nbytes), record)
            # Positions outside are skipped, because these bytes may not have been checked. `index_put_` adds in order,
            # but `scatter_add_` by atomics on a GPU, which also flush denormal numbers to 0.
            inside = positions < record.n
            places = (positions + record.n * torch.arange(rows, device=out.device).unsqueeze(1))[inside]
            total.view(-1).index_put_((places,), values[inside].to(total.dtype) * weight, accumulate=True)
        if total is not part:
            part.copy_(total)


def check(payload: Tensor, layout: TopKLayout) -> None:
    """Raise ValueError for bytes that `encode` could not have written."""
    scales, values = [], []
    for record, (rows, _, nbytes) in layout.parts(_BATCH_ELEMENTS):
        packed = payload[nbytes].view(rows, record.nbytes)
        values.append(check_record(packed, record).view(-1))
        if record.bits < 32:
            scales.append(numbers.unpack(packed[:, : record.codes_at], 16, record.codes_at // 2).view(-1))
    if scales:
        numbers.check_scales(torch.cat(scales))
    numbers.check_floats(torch.cat(values))


def select(magnitudes: Tensor, k: int) -> Tensor:
    """Return the ascending positions of the k largest values of each row; of equal values, the lowest positions.

    `Tensor.topk` only finds the k-th largest value, because its choice among equal ones depends on the device.
    """
    threshold = magnitudes.topk(k, dim=1).values[:, -1:]
    above, ties = magnitudes > threshold, magnitudes == threshold
    wanted = k - above.sum(1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(1) <= wanted))
    return chosen.nonzero()[:, 1].view(-1, k)


# Values -------------------------------------------------------------------------------------------------------------


def quantize(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return (scales as bfloat16 bits, codes) for rows of finite values, at 1, 2, 4, 8 or 16 bits."""
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
        step = numbers.to_bfloat16_bits(numbers.divided(magnitudes.amax(1) - low_value, levels - 1))
        index = numbers.nearest_level(magnitudes, low=low_value, step=numbers.from_bfloat16_bits(step), levels=levels)
        scales = torch.stack([low, step], 1)
    return scales, index | numbers.sign_bit(values, bits)


def dequantize(scales: Tensor, codes: Tensor, bits: int) -> Tensor:
    """Return the float32 values that the scales and codes represent."""
    low = numbers.from_bfloat16_bits(scales[:, 0])
    step = numbers.from_bfloat16_bits(scales[:, -1]) if bits > 1 else torch.zeros_like(low)
    return numbers.signed_levels(codes, bits=bits, low=low, step=step)


# Records ------------------------------------------------------------------------------------------------------------


def pack_record(positions: Tensor, values: Tensor, record: TopKRecord, *, is_marked: bool = False) -> Tensor:
    """Pack rows of k ascending positions and their values, which are NaN if `is_marked`, into rows of bytes."""
    if record.bits == 32:
        parts = [values.to(torch.float32).contiguous().view(torch.uint8)]
    else:
        if is_marked:
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
    """Unpack positions and values; the inverse of `pack_record`.

    Bytes that `pack_record` cannot have written may give positions outside the record. A missing position is
    `record.n`.
    """
    return unpack_positions(packed, record), unpack_values(packed, record)


def unpack_values(packed: Tensor, record: TopKRecord) -> Tensor:
    """Unpack the values of each record."""
    codes = packed[:, record.codes_at : record.low_at]
    if record.bits == 32:
        return codes.reshape(-1).clone().view(torch.float32).view(-1, record.k)
    scales = numbers.unpack(packed[:, : record.codes_at], 16, record.codes_at // 2)
    return dequantize(scales, numbers.unpack(codes, record.bits, record.k), record.bits)


def unpack_positions(packed: Tensor, record: TopKRecord) -> Tensor:
    """Unpack the positions of each record."""
    low = numbers.unpack(packed[:, record.low_at : record.high_at], record.low_bits, record.k)
    bitmap = numbers.unpack_bits(packed[:, record.high_at :])
    if packed.shape[0] == 1:  # may be a record of the whole tensor, so it takes little memory, and no time to sort
        positions = bitmap[0].nonzero().view(1, -1)[:, : record.k]
        found = positions.shape[1]
        positions.sub_(torch.arange(found, device=packed.device)).bitwise_left_shift_(record.low_bits)
        positions.bitwise_or_(low[:, :found])
        return torch.nn.functional.pad(positions, (0, record.k - found), value=record.n)
    # A stable sort puts the places of the ones first, in their order, whatever their number.
    bitmap, places = bitmap.sort(dim=1, descending=True, stable=True)
    high = places[:, : record.k] - torch.arange(record.k, device=packed.device)
    return torch.where(bitmap[:, : record.k] == 1, (high << record.low_bits) | low, record.n)


def check_record(packed: Tensor, record: TopKRecord) -> Tensor:
    """Raise ValueError unless there are k ascending positions below n and the padding is zero. Return the values."""
    if bool((numbers.unpack_bits(packed[:, record.high_at :]).sum(1) != record.k).any()):
        raise ValueError(f"a record has another number of positions than {record.k}")
    numbers.check_padding(packed[:, record.low_at : record.high_at], record.k * record.low_bits)
    numbers.check_padding(packed[:, record.high_at :], record.k + ((record.n - 1) >> record.low_bits))
    positions = unpack_positions(packed, record)
    if bool((positions[:, 1:] <= positions[:, :-1]).any()):
        raise ValueError("positions are not in ascending order")
    if bool((positions[:, -1] >= record.n).any()):
        raise ValueError(f"a position is outside its chunk of {record.n} elements")
    del positions  # of a record of the whole tensor: eight bytes each
    numbers.check_padding(packed[:, record.codes_at : record.low_at], record.k * record.bits)
    return unpack_values(packed, record)
