"""The place of a rank: its number, the other ranks of its node, and its device."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True)
class Place:
    """A rank and the world size, in the whole run and on its node."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among the ranks of this node."""
    local_world_size: int

    @property
    def on_one_machine(self) -> bool:
        """Return whether all ranks are on one node."""
        return self.local_world_size == self.world_size

    @classmethod
    def of_torchrun(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Return the place that torchrun, or a launcher with the same environment variables, has set for this process.

        Returns None if RANK and WORLD_SIZE are not set. Raises ValueError if a variable has no valid number.
        """
        if not {"RANK", "WORLD_SIZE"} <= environment.keys():
            return None
        found = {}
        for name, default in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
            text = environment.get(name, default)
            if not text.isdecimal():
                raise ValueError(f"{name}={text} in the environment, expected a whole number, as torchrun sets it")
            found[name] = int(text)
        for name, size in {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}.items():
            if found[name] >= found[size]:
                raise ValueError(f"{name}={found[name]} with {size}={found[size]}, expected 0 to {found[size] - 1}")
        return cls(*found.values())


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
