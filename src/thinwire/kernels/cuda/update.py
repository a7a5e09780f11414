"""An optimizer's update of one entry, for the kernels that make it, and what they need to know of it."""

import triton
import triton.language as tl
from torch import Tensor

from ..updates import AdamUpdate, Update

NOTHING, MOMENTUM, ADAM = 0, 1, 2
"""What a kernel makes of a gradient first: nothing, gain g + share m, or Adam's."""


def makes(update: Update | None) -> int:
    return NOTHING if update is None else ADAM if isinstance(update, AdamUpdate) else MOMENTUM


def moments_of(
    update: Update | None, g: Tensor, entries: slice
) -> tuple[Tensor, Tensor, float, float, float, float, float, float]:
    """m and v of these entries, and the numbers of `update_of`; where there is no m or v, g stands in its place."""
    if update is None:
        return g, g, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    m = update.m.view(-1)[entries]
    if isinstance(update, AdamUpdate):
        gain = (1 - update.beta1) * update.factor
        v = update.v.view(-1)[entries]
        return m, v, update.beta1, gain, update.scale, update.floor, update.limit, update.rate
    return m, m, update.share, update.gain, 0.0, 0.0, 0.0, update.rate


@triton.jit
def update_of(g, m, v, beta1, gain, scale, floor, limit, rate):  # type: ignore[no-untyped-def]
    """rate * (gain g + beta1 m) / (scale sqrt(v) + floor), cut to ±limit before the rate. Inf and NaN stay.

    What is so large that its square would be infinite becomes Inf.
    """
    own = gain * g
    update = tl.div_rn(own + beta1 * m, scale * tl.sqrt_rn(v) + floor)
    cut = tl.where(update > 0, limit, -limit)
    magnitude = tl.abs(update)
    sent = rate * tl.where((magnitude > limit) & (magnitude < float("inf")), cut, update)
    infinite = tl.where(own > 0, float("inf"), -float("inf"))
    return tl.where(tl.abs(own) > 1.8446743e19, infinite, sent)
