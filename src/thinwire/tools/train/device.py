"""The device of a rank, and the backend of its process group."""

import torch


def pick_device(name: str, local_rank: int) -> torch.device:
    """Return the device for a rank of this node; raise ValueError if there is no device of the requested kind."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(kind for kind, there in available.items() if there) if name == "auto" else name
    if not available[kind]:
        raise ValueError(f"--device {kind}, but torch finds no {kind.upper()} device here; use --device cpu, or auto")
    return torch.device("cuda", local_rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)


def pick_backend(device: torch.device, local_world_size: int) -> str:
    """Return the backend of the process group. NCCL needs a GPU for each rank; ranks that share a GPU use gloo."""
    if device.type == "cuda" and local_world_size <= torch.cuda.device_count():
        return "cpu:gloo,cuda:nccl"
    return "gloo"
