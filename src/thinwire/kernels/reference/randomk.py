"""One element from each of k strata, drawn from the key: the same positions on every rank, none of them sent.

Strata keep the positions sorted and evenly spread, and a draw takes O(k). Without a residual, a value is multiplied by
the width of its stratum, so that its expectation is right. With a residual it is not, because the error feedback would
not contract.
"""

import torch
from torch import Tensor

from ..layout import RandomKLayout, residual_dtype
from . import numbers
from .dense import check as check
from .dense import mark as mark
from .dense import read_values


def positions_and_widths(layout: RandomKLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the position drawn in each stratum, and the width of each stratum."""
    stratum = torch.arange(layout.k, device=device)
    width, wider = divmod(layout.numel, layout.k)
    widths = width + (stratum < wider).to(torch.int64)
    start = stratum * width + stratum.clamp(max=wider)
    # 31 random bits times a width below 2**32 stays inside int64.
    return start + ((numbers.draw(layout.key, stratum) >> 32) * widths >> 31), widths


def encode(tensor: Tensor, residual: Tensor | None, layout: RandomKLayout, payload: Tensor) -> bool:
    """Write the payload of tensor + residual. If the sum is not finite, write the mark and return False."""
    total = numbers.add_residual(tensor, residual)
    if not numbers.is_finite(total):
        mark(layout, payload)
        return False
    positions, widths = positions_and_widths(layout, tensor.device)
    values = total[positions]
    if residual is None:
        values = values * widths
    # Values that scaling moves beyond the range of the dtype saturate.
    limit = torch.finfo(layout.dtype).max
    payload.copy_(values.clamp(-limit, limit).to(layout.dtype).view(torch.uint8))
    return True


def commit(tensor: Tensor, residual: Tensor, layout: RandomKLayout, payload: Tensor) -> None:
    """Compute residual <- tensor + residual - decode(payload)."""
    residual.add_(tensor)
    decode(payload.unsqueeze(0), layout=layout, out=residual, weight=-1.0, add=True)


def decode(payloads: Tensor, layout: RandomKLayout, out: Tensor, weight: float, add: bool) -> None:
    """Compute out <- (out if add else 0) + weight * each payload."""
    positions, _ = positions_and_widths(layout, out.device)
    flat = out.view(-1)
    if not add:
        flat.zero_()
    dtype = residual_dtype(out.dtype)
    total = flat[positions].to(dtype)
    for payload in payloads:
        total = total + read_values(payload, layout.dtype).to(dtype) * weight
    flat[positions] = total.to(out.dtype)
