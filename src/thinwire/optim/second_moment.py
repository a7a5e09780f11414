"""The unit of AdamW's second moments: that of the averaged gradient, though each rank follows its own.

torch's AdamW divides by the root of E[ḡ²], the second moment of the gradient averaged over P ranks. A rank follows
E[gᵢ²], that of its own gradient, which costs no bytes. Where noise dominates, that is P times as large, and steps would
be up to sqrt(P) too short. So for every tensor

    c = mean(ḡ²) / mean over ranks of mean(gᵢ²),    between 1 / P and 1,

is measured now and then, and the averaged update is divided by sqrt(c). It is measured on a sample of the elements, at
positions that all ranks draw alike, so that their values can be averaged as they are.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..sync.policy import DENSE
from ..sync.synchronizer import Synchronizer


def measure(sync: Synchronizer, samples: Mapping[str, Tensor]) -> dict[str, float]:
    """Return c by name, from this rank's samples; all ranks call this with the same names, and get the same.

    A tensor without any gradient is left out.
    """
    if not samples:
        return {}
    sizes = [part.numel() for part in samples.values()]
    own = torch.stack([part.double().square().mean() for part in samples.values()])
    averaged = torch.cat(list(samples.values()))
    sync.average([averaged, own], DENSE)
    of_average = torch.stack([part.double().square().mean() for part in averaged.split(sizes)])
    found = zip(samples, of_average.tolist(), own.tolist(), strict=True)
    return {name: min(1.0, max(1 / sync.world_size, mean / each)) for name, mean, each in found if each > 0}


def for_ranks(c: float, saved: int, ranks: int) -> float:
    """Return what c becomes with another number of ranks, if gradients are a signal and independent noise.

    A share s of E[gᵢ²] is signal, and c = s + (1 - s) / P.

    >>> round(for_ranks(0.55, 2, 4), 3)
    0.325
    """
    if saved == ranks or saved == 1:
        return c
    signal = max(0.0, (c - 1 / saved) / (1 - 1 / saved))
    return signal + (1 - signal) / ranks
