"""Number formats on the device: the same bits as `reference.numbers`.

A product and a sum are rounded one after the other, as torch does (`launch` forbids the compiler to fuse them).
Division is `div_rn` for the same reason: Triton's `/` of float32 is off by up to two units in the last place.
"""

import triton
import triton.language as tl

MARK = tl.constexpr(0x7FC0)
INFINITY_BITS = tl.constexpr(0x7F800000)
"""Magnitudes are compared as the integers their bits are; from here on they are not finite."""

_SMALLEST_SCALE = tl.constexpr(0x0080)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23


@triton.jit
def magnitude_bits(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def cut_bfloat16(x):  # type: ignore[no-untyped-def]
    """The bits of the bfloat16 next to x >= 0 towards zero; denormal ones become 0."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) >> 16
    return tl.where(bits >= _SMALLEST_SCALE, bits, 0)


@triton.jit
def from_bfloat16(bits):  # type: ignore[no-untyped-def]
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def read_bfloat16(pointer, mask):  # type: ignore[no-untyped-def]
    """Two bytes at any address."""
    low, high = tl.load(pointer, mask=mask, other=0), tl.load(pointer + 1, mask=mask, other=0)
    return from_bfloat16(low.to(tl.int32) | (high.to(tl.int32) << 8))


@triton.jit
def inverse(step):  # type: ignore[no-untyped-def]
    """1 / step, and 0 for a step of 0."""
    return tl.where(step > 0, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), tl.where(step > 0, step, 1.0)), 0.0)


@triton.jit
def nearest_integer(x):  # type: ignore[no-untyped-def]
    """Halves to the even one, for 0 <= x < 2**22: adding 1.5 * 2**23 leaves no bits for a fraction."""
    return ((x + _ROUNDER) - _ROUNDER).to(tl.int32)


@triton.jit
def signed_level(code, low, step, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """±(low + index * step) of a code of up to 16 bits, in float32."""
    index = code & ((1 << (BITS - 1)) - 1)
    level = low + index.to(tl.float32) * step
    return tl.where((code >> (BITS - 1)) == 1, -level, level)


@triton.jit
def draw(key, counter):  # type: ignore[no-untyped-def]
    """63 random bits: splitmix64, a pure function of (key, counter); all of it modulo 2**64."""
    z = counter.to(tl.uint64) * 0x9E3779B97F4A7C15 + key.to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 1).to(tl.int64)


_DROWNED = tl.constexpr(2.0**-22)


@triton.jit
def is_drowned(was, g, level):  # type: ignore[no-untyped-def]
    """Whether was = (r + g - level) + level - g, as it was rounded, says little of the residual r.

    If g, or the level that was sent for it, is four million times larger, it is the rounding of those sums: noise,
    which after a gradient of 1e20 would be 1e12.
    """
    return tl.abs(was) <= tl.maximum(tl.abs(g), tl.abs(level)) * _DROWNED
