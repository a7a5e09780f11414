"""Optimizers that compress their update instead of the gradient."""

from .adamw import AdamW as AdamW
from .local_steps import LocalSteps as LocalSteps
from .sgd import SGD as SGD
