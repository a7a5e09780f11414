"""The unit of AdamW's second moments: that of the averaged gradient, though each rank uses its own gradient.

torch's AdamW divides by the root of E[ḡ²], of the gradient averaged over P ranks. A rank computes E[gᵢ²], of its own
gradient. Where noise dominates, it is P times as large, and steps would be too short by up to sqrt(P). So for every
tensor

    c = mean(ḡ²) / mean over ranks of mean(gᵢ²),    between 1 / P and 1,

is measured from time to time, by samples at positions that all ranks draw alike, and the averaged update is divided by
sqrt(c).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..sync.policy import DENSE
from ..sync.synchronizer import Synchronizer


def measure(sync: Synchronizer, samples: Mapping[str, Tensor]) -> dict[str, float]:
    """Return c by name, from samples; all ranks call it, and get the same. A tensor without gradient is left out."""
    if not samples:
        return {}
    sizes = [part.numel() for part in samples.values()]
    own = _mean_squares(list(samples.values()))
    averaged = torch.cat(list(samples.values()))
    sync.average([averaged, own], DENSE)
    of_average = _mean_squares(averaged.split(sizes))
    if sync.shards is not None and sync.shards.size > 1:  # each shard counts by its number of elements
        numels = torch.tensor([(sync.numels or {})[name] for name in samples], dtype=own.dtype, device=own.device)
        of_average, own = sync.shards.add(torch.stack([of_average, own]) * numels)
    found = zip(samples, of_average.tolist(), own.tolist(), strict=True)
    return {name: min(1.0, max(1 / sync.world_size, mean / each)) for name, mean, each in found if each > 0}


def _mean_squares(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double().square().sum() / max(1, part.numel()) for part in parts])


def for_ranks(c: float, saved: int, ranks: int) -> float:
    """Return c for another number of ranks, if gradients consist of a signal and independent noise.

    A share s of E[gᵢ²] is signal, and c = s + (1 - s) / P.

    >>> round(for_ranks(0.55, 2, 4), 3)
    0.325
    """
    if saved == ranks or saved == 1:
        return c
    signal = max(0.0, (c - 1 / saved) / (1 - 1 / saved))
    return signal + (1 - signal) / ranks
