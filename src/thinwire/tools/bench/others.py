"""What the methods of others need: hooks of DDP, several optimizers at once, and the matrices for Muon.

DDP checks annotations of a hook: a bucket is a dist.GradBucket.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.optim import Optimizer

OPTIONS = ("outer_lr", "outer_momentum", "nesterov", "decay", "fragments", "delay")
"""Options of LocalSteps that a method may have. All others are those of the optimizer inside."""


class Several:
    """Several optimizers that step together, each with parameters of its own."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Take a step of each."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Reset the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the hidden matrices of a model, which Muon is for, and all other parameters.

    Embeddings are not hidden, nor is a linear layer that is the last child of the model: its head. Raises ValueError if
    there is no hidden matrix.
    """
    outer: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outer += [child for child in list(model.children())[-1:] if isinstance(child, nn.Linear)]
    apart = {id(parameter) for module in outer for parameter in module.parameters()}
    hidden = [one for one in model.parameters() if one.ndim == 2 and id(one) not in apart]
    if not hidden:
        raise ValueError(f"{type(model).__name__} has no hidden matrix, which Muon is for: use adamw")
    taken = {id(one) for one in hidden}
    return hidden, [one for one in model.parameters() if id(one) not in taken]


def send_nothing(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Send nothing: what is left is DDP itself, which copies gradients into buckets and calls Python for each."""
    buffer = bucket.buffer()
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


def bf16_hook(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Send bfloat16 by torch's own hook, which DDP refuses by its name where there is no NCCL."""
    return bf16_compress_hook(None, bucket)  # type: ignore[arg-type]
