"""Does the work of a compressor in plain torch operations, as baselines."""

from math import ceil

from torch import Tensor

CHUNK = 4096
DENSITY = 1 / 64
"""Share of the elements that the baselines keep in their own rows."""


def select(gradient: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Apply error feedback and select the k largest elements of the whole tensor: add, topk, gather, clear."""
    residual.add_(gradient)
    positions = residual.abs().topk(k, sorted=False).indices
    values = residual[positions]
    residual[positions] = 0
    return positions, values


def select_per_chunk(gradient: Tensor, residual: Tensor, density: float) -> list[tuple[Tensor, Tensor]]:
    """Apply error feedback and select the largest elements of each chunk of 4,096: full chunks first, then the rest."""
    residual.add_(gradient)
    full = residual.numel() // CHUNK * CHUNK
    selected = []
    for rows in (residual[:full].view(-1, CHUNK), residual[full:].unsqueeze(0)):
        if rows.numel():
            positions = rows.abs().topk(ceil(rows.shape[1] * density), dim=1, sorted=False).indices
            selected.append((positions, rows.gather(1, positions)))
            rows.scatter_(1, positions, 0)
    return selected
