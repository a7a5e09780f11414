"""Launches of kernels: on the device of their tensors, without fused multiply-adds."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

REFERENCE_DTYPES = (torch.float64,)
"""Tensors of these dtypes use the reference: a GPU has few float64 units, and gradients are not sent in float64."""

GUARDS = 1024
"""Programs of a launch that usually finds its flag not set, and does nothing."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch a Triton kernel on the current stream of the first tensor's device.

    Products and sums are rounded one after the other, as torch does. Otherwise backends would differ in the last bit.
    """
    tensor = next(arg for arg in args if isinstance(arg, Tensor))
    with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
        kernel[grid](*args, enable_fp_fusion=False, num_stages=1, **settings)


def waiting_for(encode_flagged: Callable[..., None]) -> Callable[[Tensor, Tensor | None, Any, int, Tensor], bool]:
    """Return a kernel's `encode`, which waits for the device and returns whether the input was finite."""

    def encode(tensor: Tensor, residual: Tensor | None, layout: Any, key: int, payload: Tensor) -> bool:
        flag = torch.zeros(1, dtype=torch.int32, device=tensor.device)
        encode_flagged(tensor, residual, layout, key, payload, flag)
        return not flag.item()

    return encode
