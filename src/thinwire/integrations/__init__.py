"""Thin adapters between a `Synchronizer` and those who have gradients."""

from .ddp import attach, register

__all__ = ["attach", "register"]
