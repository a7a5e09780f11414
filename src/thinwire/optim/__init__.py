"""Optimizers that compress their update instead of the gradient."""

from .adamw import AdamW as AdamW
from .sgd import SGD as SGD
