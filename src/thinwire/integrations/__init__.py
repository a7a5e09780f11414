"""Adapters between a `Synchronizer` and sources of gradients, such as DDP."""

from .ddp import attach, register_ddp_hook

__all__ = ["attach", "register_ddp_hook"]
