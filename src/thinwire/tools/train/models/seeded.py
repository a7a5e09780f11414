"""Builds models without memory and then fills them.

Otherwise the layers would fill themselves from torch's global generator.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch


class Fillable(Protocol):
    """A model that `filled` can initialise."""

    def to_empty(self, *, device: str) -> object:
        """Move parameters and buffers to a device, without values."""

    def initialise(self, generator: torch.Generator) -> None:
        """Give every parameter and every buffer its initial value."""


Model = TypeVar("Model", bound=Fillable)


def filled(build: Callable[[], Model], seed: int) -> Model:
    """Build a model and fill it with weights that depend only on the seed."""
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    model.initialise(torch.Generator().manual_seed(seed))
    return model
