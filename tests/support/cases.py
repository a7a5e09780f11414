"""The contract table: which specs, sizes, dtypes and inputs every registered compressor must get through.

A new compressor needs one line in `SPECS`; a test fails and says so until it has one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

import thinwire
from support.pairwise import pairwise
from thinwire.kernels.layout import Layout, RandomKLayout, residual_dtype

BACKENDS = ("reference", "cpu")

SPECS: dict[str, list[str]] = {
    "none": ["none"],
    "topk": [
        *(f"topk:ratio=1/64,bits={bits}" for bits in (1, 2, 4, 8, 16, 32)),
        "topk:ratio=1/256,bits=2",
        "topk:ratio=1%,bits=4",
        "topk:ratio=1/16,bits=32",
        "topk:ratio=1/4,bits=2,chunk=16",
        "topk:ratio=1/16,bits=32,chunk=16",
        "topk:ratio=1/3,bits=1,chunk=64",
        "topk:ratio=1/64,bits=2,chunk=65536",
        "topk:ratio=1/64,bits=2,chunk=none",
        "topk:ratio=1/64,bits=32,chunk=none",
        "topk:ratio=1,bits=2",
    ],
    "quantize": [
        *(f"quantize:bits={bits}" for bits in (1, 2, 4, 8)),
        "quantize:bits=2,block=32",
        "quantize:bits=4,block=65536",
    ],
    "randomk": ["randomk:ratio=1/64,seed=5", "randomk:ratio=1%", "randomk:ratio=1/3,seed=5"],
}
SIZES = (0, 1, 2, 4095, 4096, 4097, 100_003)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INPUTS = ("zeros", "one-hot", "ties", "denormals", "huge", "normal")
KEY = 11

ALL_SPECS = [spec for specs in SPECS.values() for spec in specs]


def sends_exactly(compressor: thinwire.Compressor, dtype: torch.dtype) -> bool:
    """Whether values travel without loss, so that sent + kept is the input to the last bit."""
    if isinstance(compressor, thinwire.TopK):
        return compressor.bits == 32
    return isinstance(compressor, thinwire.NoCompression | thinwire.RandomK) and dtype.itemsize >= 4


def has_kernel(layout: Layout) -> bool:
    """Whether a backend other than the reference has a kernel for it: not for RandomK, nor for long chunks."""
    return not isinstance(layout, RandomKLayout) and getattr(getattr(layout, "record", None), "n", 0) <= 1 << 14


def make_input(kind: str, numel: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A tensor of one kind, and a residual of the same kind which neither overflows nor hides it.

    >>> make_input("one-hot", 3, torch.float32)[0]
    tensor([0., 1., 0.])
    """
    tensor, residual = _make_input(kind, numel, dtype, seed)
    return tensor.clone(), residual.clone()


@cache
def _make_input(kind: str, numel: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * INPUTS.index(kind) + seed)
    info, kept = torch.finfo(dtype), residual_dtype(dtype)

    def normal() -> Tensor:
        return torch.randn(numel, generator=generator, dtype=torch.float64)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (numel,), generator=generator).to(torch.float64)

    if kind == "zeros":
        tensor = residual = torch.zeros(numel)
    elif kind == "one-hot":
        tensor, residual = torch.zeros(numel), torch.zeros(numel)
        tensor[numel // 2 : numel // 2 + 1] = 1
        residual[numel // 3 : numel // 3 + 1] = -0.5
    elif kind == "ties":
        tensor, residual = whole(-2, 2), whole(0, 1)
    elif kind == "denormals":
        smallest = info.smallest_normal * info.eps
        tensor, residual = whole(-9, 9) * smallest, whole(-3, 3) * smallest
    elif kind == "huge":
        size = torch.rand(numel, generator=generator, dtype=torch.float64)
        tensor = normal().sign() * info.max * (1 - 0.1 * size * (size > 0.2))
        residual = -tensor * 1e-3 * size
    else:
        tensor, residual = normal(), 0.3 * normal()
    return tensor.to(dtype), residual.to(kept)


@dataclass(frozen=True)
class Case:
    """One row of the table, and what `compress` made of it. `str` names it in failures."""

    label: str
    kind: str
    compressor: thinwire.Compressor
    tensor: Tensor
    before: Tensor | None
    after: Tensor | None
    """The residual as it was given, and afterwards."""
    ct: thinwire.CompressedTensor

    @cached_property
    def came_in(self) -> Tensor:
        flat = self.tensor.to(residual_dtype(self.tensor.dtype))
        return flat if self.before is None else flat + self.before

    @cached_property
    def sent(self) -> Tensor:
        """Decoded in the dtype of the arithmetic, so that no further rounding hides an error."""
        return self.ct.decompress(torch.empty(self.tensor.shape, dtype=residual_dtype(self.tensor.dtype)))

    def __str__(self) -> str:
        return self.label


def rows(name: str, backend: str) -> Iterator[Case]:
    """The rows of the table for all specs of one compressor: pairs of size, dtype, input and residual for each."""
    for spec in SPECS[name]:
        compressor = thinwire.compressor(spec)
        for numel, dtype, kind, kept in pairwise(SIZES, DTYPES, INPUTS, ("own", "zero", "no")):
            tensor, residual = make_input(kind, numel, dtype)
            before = {"own": residual, "zero": torch.zeros_like(residual), "no": None}[kept]
            after = None if before is None else before.clone()
            ct = compressor.compress(tensor, after, key=KEY)
            label = f"{spec}, {numel} x {dtype}, {kind}, {kept} residual, {backend} kernels"
            yield Case(label, kind, compressor, tensor, before, after, ct)
