"""Adam's update of one entry, for the kernels that make it."""

import triton
import triton.language as tl


@triton.jit
def update_of(g, m, v, beta1, gain, scale, floor, limit, rate):  # type: ignore[no-untyped-def]
    """rate * (gain g + beta1 m) / (scale sqrt(v) + floor), cut to ±limit before the rate. Inf and NaN stay."""
    update = tl.div_rn(gain * g + beta1 * m, scale * tl.sqrt_rn(v) + floor)
    cut = tl.where(update > 0, limit, -limit)
    magnitude = tl.abs(update)
    return rate * tl.where((magnitude > limit) & (magnitude < float("inf")), cut, update)
