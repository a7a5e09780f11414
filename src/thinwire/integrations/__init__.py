"""Adapters between a `Synchronizer` and sources of gradients, such as DDP."""

from .attach import attach as attach
from .ddp import register_ddp_hook as register_ddp_hook
