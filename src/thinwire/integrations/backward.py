"""The end of the backward pass."""

from collections.abc import Callable

import torch


def after_backward(action: Callable[[], None]) -> None:
    """Run an action after everything that DDP or FSDP does at the end of the backward pass under way.

    A callback that is queued by another callback comes last.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(action))
