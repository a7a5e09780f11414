"""Numbers of a step, such as the learning rate, in the memory of a GPU: there a recording finds them."""

from collections.abc import Sequence

import torch
from torch import Tensor


class DeviceNumbers:
    """A float32 vector that stays where it is, and is filled anew at every step."""

    def __init__(self) -> None:
        self._vector: Tensor | None = None

    def fill(self, numbers: Sequence[float], device: torch.device) -> Tensor:
        """Return them, on the device once it has come so far; the host does not wait."""
        if self._vector is None or self._vector.numel() != len(numbers) or self._vector.device != device:
            self._vector = torch.empty(len(numbers), dtype=torch.float32, device=device)
        return self._vector.copy_(torch.tensor(numbers, dtype=torch.float32, pin_memory=True), non_blocking=True)
