"""Optimizers that compress their update instead of the gradient."""

from .adamw import AdamW
from .sgd import SGD

__all__ = ["SGD", "AdamW"]
