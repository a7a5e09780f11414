"""A guard against gradients that are clipped or scaled after they were sent, which would have no effect."""

from collections.abc import Collection, Mapping
from functools import cache

import torch
from torch import Tensor

from ..sync.shards import local_of


class GradientGuard:
    """Compares gradients with those that were sent, by identity and by torch's count of their changes."""

    def __init__(self, parameters: Mapping[str, Tensor], optimizer: str) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._sent: dict[str, tuple[Tensor | None, int]] = {}  # and how often each had changed by then

    def record(self) -> None:
        self._sent = {}
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            self._sent[name] = grad, -1 if grad is None else local_of(grad)._version

    def forget(self) -> None:
        self._sent = {}

    def find_fault(self, sent: Collection[str], *, is_checked_by_scaler: bool) -> str | None:
        """Return what is wrong with the gradients, if anything; a GradScaler's look for Inf may count as a change."""
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            if name not in sent:
                if grad is not None:
                    return (
                        f"parameter {name!r} has a gradient that was not exchanged: set its .grad to None, or, "
                        "to train it with DDP, set requires_grad before DistributedDataParallel(...) is made"
                    )
            elif name not in self._sent:
                return "the backward pass did not come to an end: call zero_grad(), and backward again"
            elif grad is not self._sent[name][0] or (
                grad is not None and not self._is_as_sent(name, grad, is_checked_by_scaler)
            ):
                beside = ", or of one beside it in memory," if grad is not None and self._sharing(grad) > 1 else ""
                return self.changed(f"{name!r}{beside}")
        return None

    def changed(self, which: str) -> str:
        return (
            f"the gradient of {which} was changed after it was exchanged, as clip_grad_norm_ does; what was sent is "
            f"the gradient before that. To clip, leave clip_grad_norm_ out and give thinwire.{self._optimizer} "
            "max_grad_norm=; to know the norm, torch.nn.utils.get_total_norm; to scale, scale the loss"
        )

    def _is_as_sent(self, name: str, grad: Tensor, is_checked_by_scaler: bool) -> bool:
        changes = local_of(grad)._version - self._sent[name][1]
        if changes and is_checked_by_scaler:
            # To find Inf, GradScaler has multiplied all gradients by 1.
            counted = _changes_by_scaler(grad.device)
            return counted > 0 and changes in (counted, counted * self._sharing(grad))
        return changes == 0

    def _sharing(self, grad: Tensor) -> int:
        """Return how many gradients share this one's memory, because torch counts changes of all views together."""
        memory = local_of(grad).untyped_storage().data_ptr()
        others = (local_of(p.grad) for p in self._parameters.values() if p.grad is not None)
        return sum(other.untyped_storage().data_ptr() == memory for other in others)


@cache
def _changes_by_scaler(device: torch.device) -> int:
    """Return how often GradScaler's check for Inf counts as a change; that depends on the version of torch."""
    probe = torch.ones(1, device=device)
    before = probe._version
    found, scale = torch.zeros(1, device=device), torch.ones(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_([probe], found, scale)
    return int(probe._version - before)
