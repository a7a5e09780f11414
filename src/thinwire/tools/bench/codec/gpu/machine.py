"""Describes the hardware and drivers that a time on a GPU depends on."""

import subprocess

import torch


def machine(device: torch.device) -> dict[str, object]:
    """Return the properties of the device for the conditions of a record."""
    found = torch.cuda.get_device_properties(device)
    return {
        "device": device.type,
        "device_name": found.name,
        "device_memory": found.total_memory,
        "device_cache": found.L2_cache_size,
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "triton": _triton(),
        "driver": _driver(),
    }


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _driver() -> str | None:
    """Return the driver version from nvidia-smi, because torch does not report it. None if nvidia-smi fails."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told.split("\n")[0].strip() or None
