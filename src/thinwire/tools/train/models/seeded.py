"""Models that are built without memory and then filled, or their layers would use torch's global generator."""

from typing import Any, Self

import torch
from torch import nn


class SeededModel(nn.Module):
    """A model whose weights depend only on a seed."""

    @classmethod
    def from_seed(cls, config: Any, seed: int) -> Self:
        """Return a new model of this config."""
        with torch.device("meta"):
            model = cls(config)
        model.to_empty(device="cpu")
        model.initialise(torch.Generator().manual_seed(seed))
        return model

    def initialise(self, generator: torch.Generator) -> None:
        """Give every parameter and every buffer its initial value."""
        raise NotImplementedError
