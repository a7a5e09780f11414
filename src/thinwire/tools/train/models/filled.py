"""Models are built without memory, then filled: layers would fill themselves from torch's global generator."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch


class Fillable(Protocol):
    def to_empty(self, *, device: str) -> object: ...

    def initialise(self, generator: torch.Generator) -> None:
        """Give every parameter and every buffer its first value."""


Model = TypeVar("Model", bound=Fillable)


def filled(build: Callable[[], Model], seed: int) -> Model:
    """What `build` returns, with weights that depend on the seed alone."""
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    model.initialise(torch.Generator().manual_seed(seed))
    return model
