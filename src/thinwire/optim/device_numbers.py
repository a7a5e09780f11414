"""Numbers of a step, such as the learning rate, in GPU memory, where a recording reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor


class DeviceNumbers:
    """A float32 vector that keeps its address, and is filled again at every step."""

    def __init__(self) -> None:
        self._vector: Tensor | None = None

    def fill(self, numbers: Sequence[float], device: torch.device) -> Tensor:
        """Copy the numbers to the device, and return the vector; the CPU does not wait for the copy."""
        if self._vector is None or self._vector.numel() != len(numbers) or self._vector.device != device:
            self._vector = torch.empty(len(numbers), dtype=torch.float32, device=device)
        return self._vector.copy_(torch.tensor(numbers, dtype=torch.float32, pin_memory=True), non_blocking=True)
