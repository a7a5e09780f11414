"""Turns the options, or the defaults for every registered compressor, into a list of cases to measure."""

from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

import torch

from thinwire import compressors, kernels
from thinwire.compressors import Compressor
from thinwire.tools.units import parse_count

DEFAULT_SPECS = {
    "none": ["none"],
    "quantize": ["quantize:bits=8", "quantize:bits=4", "quantize:bits=2", "quantize:bits=1"],
    "randomk": ["randomk:ratio=1/64"],
    "topk": [
        "topk:ratio=1/64,bits=2",
        "topk:ratio=1/256,bits=4",
        "topk:ratio=1%,bits=32",
        "topk:ratio=1/16,bits=8",
    ],
}
GPU_SPECS = {
    "topk": ["topk:ratio=1/64,bits=2", "topk:ratio=1/8,bits=4"],
    **{name: DEFAULT_SPECS[name] for name in ("quantize", "randomk", "none")},
}
LARGEST = 1 << 40
"""Elements of a tensor."""
OTHER_DTYPES = (torch.bfloat16, torch.float16, torch.float64)
GPU_DTYPES = ("float32", "bfloat16")


class Case(NamedTuple):
    """Tensors of one size and dtype on a device, and what is measured on them."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    compressors: dict[str, Compressor]
    """By the spec as the user wrote it."""

    @property
    def title(self) -> str:
        """Return the number and dtype of the elements, as text."""
        return f"{self.numel:,} x {str(self.dtype).removeprefix('torch.')}"


def plan(specs: Sequence[str], sizes: Sequence[str], dtypes: Sequence[str] = (), device: str = "cpu") -> list[Case]:
    """Return the cases. Raises ValueError for options that cannot be run."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no CUDA device")
    if not sizes:
        raise ValueError("--sizes without a size, expected one or more")
    numels = sorted({parse_count("--sizes", text, LARGEST) for text in sizes})
    tensors = [(numel, torch.float32) for numel in numels] + [(numels[0], dtype) for dtype in OTHER_DTYPES]
    if dtypes or device == "cuda":
        names = dict.fromkeys(dtypes or GPU_DTYPES)
        tensors = [(numel, getattr(torch, name)) for numel in numels for name in names]
    built = {spec: compressors.compressor(spec) for spec in specs or default_specs(device)}
    cases = [Case(numel, dtype, torch.device(device), built) for numel, dtype in tensors]
    for given in built.values():
        try:
            for case in cases:
                kernels.select(given.layout(case.numel, case.dtype), case.device)
        except RuntimeError as error:  # the kernels cannot be loaded
            raise ValueError(str(error)) from error
    return cases


def default_specs(device: str = "cpu") -> list[str]:
    """Return several specs for each built-in compressor and one for each compressor registered by other code."""
    known = GPU_SPECS if device == "cuda" else DEFAULT_SPECS
    others = {name: kind for name, kind in compressors.registered().items() if name not in known}
    return [
        *(spec for specs in known.values() for spec in specs),
        *(
            f"{name}:ratio=1/64" if "ratio" in {field.name for field in fields(kind)} else name
            for name, kind in others.items()
        ),
    ]
