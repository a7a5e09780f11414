"""Thin adapters between a `Synchronizer` and those who have gradients."""

from .ddp import attach, register_ddp_hook

__all__ = ["attach", "register_ddp_hook"]
