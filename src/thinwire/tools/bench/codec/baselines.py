"""The same job in plain torch operations: what a compressor is measured against."""

from math import ceil

from torch import Tensor

CHUNK = 4096
DENSITY = 1 / 64
"""Share that the selecting baselines keep in rows of their own."""


def select(gradient: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Error feedback with the k largest of the whole tensor: add, topk, gather, clear."""
    residual.add_(gradient)
    positions = residual.abs().topk(k, sorted=False).indices
    values = residual[positions]
    residual[positions] = 0
    return positions, values


def select_per_chunk(gradient: Tensor, residual: Tensor, density: float) -> list[tuple[Tensor, Tensor]]:
    """Error feedback with the largest of each chunk of 4,096: the full chunks at once, then the rest."""
    residual.add_(gradient)
    full = residual.numel() // CHUNK * CHUNK
    selected = []
    for rows in (residual[:full].view(-1, CHUNK), residual[full:].unsqueeze(0)):
        if rows.numel():
            positions = rows.abs().topk(ceil(rows.shape[1] * density), dim=1, sorted=False).indices
            selected.append((positions, rows.gather(1, positions)))
            rows.scatter_(1, positions, 0)
    return selected
