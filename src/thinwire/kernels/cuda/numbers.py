"""Number formats on the device, with the same bits as `reference.numbers`.

Products and sums are rounded one after the other, as torch does (`launch` switches off the fusion). Division is
`div_rn` for the same reason: Triton's `/` of float32 is off by up to two units in the last place.
"""

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(0x7F800000)
"""The bits of infinity. Magnitudes are compared as integers; from this one on they are not finite."""

_SMALLEST_SCALE = tl.constexpr(0x0080)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23


@triton.jit
def total_at(g_ptr, r_ptr, at, n, HAS_R: tl.constexpr):
    """Return the elements of g + r at these positions, and 0 at positions from n on."""
    total = tl.load(g_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    if HAS_R:
        total += tl.load(r_ptr + at, mask=at < n, other=0.0)
    return total


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| as an int32, which has the order of |x|."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def cut_bfloat16(x):
    """Return the bits of the next bfloat16 towards zero, for x >= 0; denormal ones become 0."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) >> 16
    return tl.where(bits >= _SMALLEST_SCALE, bits, 0)


@triton.jit
def from_bfloat16(bits):
    """Return the float32 value of bfloat16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def read_bfloat16(pointer, mask):
    """Return the float32 value of the bfloat16 at a pointer, which need not be aligned."""
    low, high = tl.load(pointer, mask=mask, other=0), tl.load(pointer + 1, mask=mask, other=0)
    return from_bfloat16(low.to(tl.int32) | (high.to(tl.int32) << 8))


@triton.jit
def inverse(step):
    """Return 1 / step, and 0 for a step of 0."""
    return tl.where(step > 0, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), tl.where(step > 0, step, 1.0)), 0.0)


@triton.jit
def nearest_integer(x):
    """Round 0 <= x < 2**22 to the nearest integer, halves to even: adding 1.5 * 2**23 leaves no bits for a fraction."""
    return ((x + _ROUNDER) - _ROUNDER).to(tl.int32)


@triton.jit
def signed_level(code, low, step, BITS: tl.constexpr):
    """Return ±(low + index * step) for a code of up to 16 bits, in float32."""
    index = code & ((1 << (BITS - 1)) - 1)
    level = low + index.to(tl.float32) * step
    return tl.where((code >> (BITS - 1)) == 1, -level, level)
