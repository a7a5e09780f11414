"""Number formats of a payload: bit fields, bfloat16 scales, level codes and counter-based random draws.

A value of `bits` bits is a sign (the highest bit) and the index i of a level. It represents ±(low + i * step), where
`low` and `step` are the record's scales. Scales are stored as bfloat16 and cut towards zero, so that no level exceeds
the input. With 8 significant bits, i * step is exact in float32, so every backend decodes the same bits.
"""

import math

import torch
from torch import Tensor

from ..layout import bytes_for, residual_dtype

MARK = 0x7FC0  # A bfloat16 NaN: the scale of a payload whose input was not finite
SMALLEST_SCALE = 0x0080
"""The smallest normal bfloat16. No scale lies between it and 0, so that 1 / scale is always finite."""


def add_residual(tensor: Tensor, residual: Tensor | None) -> Tensor:
    """Return tensor + residual, flat, in the dtype of the arithmetic."""
    flat = tensor.reshape(-1).to(residual_dtype(tensor.dtype))
    return flat if residual is None else flat + residual.reshape(-1)


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element is finite. This needs no memory: a NaN is the smallest and the largest."""
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


def mean_of(magnitudes: Tensor, chosen: Tensor) -> Tensor:
    """Return the means of the chosen elements along the last dimension; 0 where none is chosen.

    In float64 the sum of equal numbers is exact, so that cutting the mean loses nothing, and backends that add in
    another order get the same result. Halves are added to each other until one number is left, because the order of
    `Tensor.sum` depends on the device.
    """
    total = torch.where(chosen, magnitudes, 0).to(torch.float64)
    while (size := total.shape[-1]) > 1:
        half = size // 2
        rest = total[..., 2 * half :]
        total = torch.cat([total[..., :half] + total[..., half : 2 * half], rest], -1)
    return total.sum(-1) / chosen.sum(-1).clamp(min=1)


def divided(values: Tensor, by: float) -> Tensor:
    """Return values / by, rounded correctly: for a plain number, torch multiplies by its inverse on a GPU."""
    return values / torch.full_like(values, by)


_UNPACKED_AT_ONCE = 1 << 15  # Numbers that `unpack` handles at a time: bits take 64 times the memory of a payload


# Bit fields ---------------------------------------------------------------------------------------------------------


def pack(values: Tensor, width: int) -> Tensor:
    """Pack rows of unsigned integers into rows of bytes, `width` bits each, lowest bit first."""
    rows, count = values.shape
    shifts = torch.arange(width, device=values.device)
    bits = ((values.unsqueeze(-1) >> shifts) & 1).to(torch.uint8).view(rows, count * width)
    bits = torch.nn.functional.pad(bits, (0, bytes_for(count * width) * 8 - count * width))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=values.device)
    return (bits.view(rows, -1, 8) * weights).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """Unpack rows of bytes to rows of `count` int64; the inverse of `pack`."""
    rows, shifts = packed.shape[0], torch.arange(width, device=packed.device)
    made = torch.empty(rows, count, dtype=torch.int64, device=packed.device)
    step = max(8, _UNPACKED_AT_ONCE // max(1, rows) // 8 * 8)  # so that each stretch begins with a byte
    for start in range(0, count, step):
        stop = min(start + step, count)
        stretch = packed[:, start * width // 8 : bytes_for(stop * width)]
        bits = unpack_bits(stretch)[:, : (stop - start) * width].view(rows, stop - start, width)
        made[:, start:stop] = (bits.to(torch.int64) << shifts).sum(-1)
    return made


def unpack_bits(packed: Tensor) -> Tensor:
    """Convert rows of bytes to rows of 0 and 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).view(packed.shape[0], -1)


def check_padding(packed: Tensor, used_bits: int) -> None:
    """Raise ValueError if a bit after the first `used_bits` bits of a row is set."""
    if bool(unpack_bits(packed[:, used_bits // 8 :])[:, used_bits % 8 :].any()):
        raise ValueError("a bit beyond the last field is set, expected zeros")


# Scales and levels --------------------------------------------------------------------------------------------------


def to_bfloat16_bits(values: Tensor) -> Tensor:
    """Return the 16 bits, as int64, of the next bfloat16 towards zero, for numbers >= 0; denormal ones become 0."""
    bits = values.to(torch.float32).contiguous().view(torch.int32).to(torch.int64) >> 16
    return torch.where(bits >= SMALLEST_SCALE, bits, 0)


def from_bfloat16_bits(bits: Tensor) -> Tensor:
    """Return the float32 values of bfloat16 bits."""
    return (bits << 16).to(torch.int32).view(torch.float32)


def check_scales(bits: Tensor) -> None:
    """Raise ValueError unless every scale is 0 or a positive normal number, or every scale is the mark."""
    marked = bits == MARK
    if bool(marked.any()) and not bool(marked.all()):
        raise ValueError("some scales are marked as not finite and others are not, expected all or none")
    if not bool(marked.any()) and bool(((bits >= 0x7F80) | ((bits > 0) & (bits < SMALLEST_SCALE))).any()):
        raise ValueError("a scale is negative, denormal, infinite or NaN, expected 0 or a normal number above")


def check_floats(values: Tensor) -> None:
    """Raise ValueError unless every value is finite, or every value is NaN."""
    if is_finite(values):
        return
    nan = torch.isnan(values)
    if bool(nan.any()) and not bool(nan.all()):
        raise ValueError("some values are marked as not finite and others are not, expected all or none")
    if bool(torch.isinf(values).any()):
        raise ValueError("a value is infinite, expected finite numbers")


def nearest_level(magnitudes: Tensor, low: Tensor, step: Tensor, levels: int) -> Tensor:
    """Return the index of the level nearest to each magnitude, halves to even; `low` and `step` are per row."""
    share = (magnitudes - low.unsqueeze(-1)).clamp(min=0) * inverse(step, magnitudes.dtype).unsqueeze(-1)
    return share.clamp(max=levels - 1).round().to(torch.int64)


def sign_bit(values: Tensor, bits: int) -> Tensor:
    """Return the sign as the highest bit of a code of `bits` bits. -0.0 is negative, as its bits are."""
    return torch.signbit(values).to(torch.int64) << (bits - 1)


def inverse(step: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 / step in the precision of the values, and 0 for a step of 0: multiplying is faster than dividing."""
    return torch.where(step > 0, 1 / step.to(dtype), 0)


def signed_levels(codes: Tensor, bits: int, low: Tensor, step: Tensor) -> Tensor:
    """Return ±(low + i * step) for each code, in float32."""
    index = codes & ((1 << (bits - 1)) - 1)
    level = low.unsqueeze(-1) + index.to(torch.float32) * step.unsqueeze(-1)
    return torch.where((codes >> (bits - 1)) == 1, -level, level)


# Draws --------------------------------------------------------------------------------------------------------------


def signed(bits: int) -> int:
    """Return the int64 with the same bits. torch has no uint64 arithmetic, but multiplies int64 modulo 2**64."""
    bits %= 1 << 64
    return bits - (1 << 64) if bits >> 63 else bits


GOLDEN = signed(0x9E3779B97F4A7C15)
_FACTORS = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def draw(key: int, counters: Tensor) -> Tensor:
    """Return 63 random bits for each counter (splitmix64), a pure function of (key, counter)."""
    return shift_right(mix(counters.to(torch.int64) * GOLDEN + signed(key)), 1)


def mix(z: Tensor) -> Tensor:
    """Return the hash of each int64 by the output function of splitmix64; `z` is overwritten."""
    z.bitwise_xor_(shift_right(z, 30)).mul_(_FACTORS[0])
    z.bitwise_xor_(shift_right(z, 27)).mul_(_FACTORS[1])
    return z.bitwise_xor_(shift_right(z, 31))


def shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift each int64 to the right as if it were unsigned, which clears the copies of the sign bit."""
    return (z >> bits).bitwise_and_((1 << 64 - bits) - 1)
