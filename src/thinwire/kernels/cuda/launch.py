"""Launches of kernels: on the device of their tensors, without fused multiply-adds."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

REFERENCE_DTYPES = (torch.float64,)
"""Tensors of these dtypes use the reference: a GPU has few float64 units, and gradients are not sent in float64."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch a Triton kernel on the current stream of the first tensor's device.

    Products and sums are rounded one after the other, as torch does. Otherwise backends would differ in the last bit.
    """
    tensor = next(arg for arg in args if isinstance(arg, Tensor))
    with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
        kernel[grid](*args, enable_fp_fusion=False, num_stages=1, **settings)


def new_flag(tensor: Tensor) -> Tensor:
    """Return an int32 on the tensor's device that is 0; the kernels set it to 1 if the input is not finite."""
    return torch.zeros(1, dtype=torch.int32, device=tensor.device)
