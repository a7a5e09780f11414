"""Checks of tensors that a kernel reads or writes by their addresses."""

import torch
from torch import Tensor


def check_buffer(name: str, given: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless the tensor is contiguous, and has this shape, dtype and device."""
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != device:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}, {given.dtype} on {given.device}; "
            f"expected shape {shape}, {dtype} on {device}"
        )
    if not given.is_contiguous():
        raise ValueError(f"{name} is not contiguous, expected a contiguous tensor")


def check_apart(name: str, given: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if two contiguous tensors on one device overlap, because writing one would change the other."""
    first, second = sorted([given, other], key=Tensor.data_ptr)
    # A tensor without memory (empty, or on the meta device) has the address 0.
    if first.data_ptr() and first.data_ptr() + first.nbytes > second.data_ptr():
        raise ValueError(f"{name} shares the {other_name}'s memory, expected memory of its own")
