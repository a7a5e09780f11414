"""Adam's update in the place of the gradient, and its momentum from the update: plain torch, block by block.

    send      g <- (decay m + gain g) / (sqrt(v) scale + floor)
    commit    m <- u (sqrt(v) scale + floor)            with u, what `send` left in g

`commit` undoes the division, so that nothing has to be kept between the two, and nothing changes if a step is skipped.
"""

from torch import Tensor

_BLOCK = 1 << 22
"""Entries at a time: the temporary tensors stay this small."""


def send(g: Tensor, m: Tensor, v: Tensor, decay: float, gain: float, scale: float, floor: float) -> None:
    for g_part, m_part, v_part in zip(g.split(_BLOCK), m.split(_BLOCK), v.split(_BLOCK), strict=True):
        g_part.mul_(gain).add_(m_part, alpha=decay).div_(v_part.sqrt().mul_(scale).add_(floor))


def commit(u: Tensor, m: Tensor, v: Tensor, scale: float, floor: float) -> None:
    for u_part, m_part, v_part in zip(u.split(_BLOCK), m.split(_BLOCK), v.split(_BLOCK), strict=True):
        m_part.copy_(v_part.sqrt().mul_(scale).add_(floor).mul_(u_part))
