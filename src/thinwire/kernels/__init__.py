"""Selection of the kernels: the backend that does the arithmetic for a layout on a device.

Each backend has one kernel module per layout, with the functions of `Kernel`: encode, commit and decode. `encode` only
reads its inputs, so nothing is lost if this rank or another one finds a NaN. An input with a NaN or Inf, or a sum that
overflows, gives the *mark*: a payload in which every stored float is NaN.

`reference` is plain torch on any device, and the specification that the other backends are tested against. `cpu` uses
Numba, `cuda` uses Triton. The default is the backend of the tensor's device. It is `reference` for other devices and
for GPUs that Triton does not support. The function `force` and the environment variable THINWIRE_KERNELS override the
default, and a forced backend that cannot run raises an error. RandomK and chunks above 16,384 have only the reference
kernels. `cuda` has no float64 and no very long blocks. There `reference` runs, and a warning is logged if another
backend was forced. The backend of each call is recorded in `CompressedTensor.kernels` and in the compressor's
statistics.

The kernels of `cuda` run asynchronously: the CPU does not wait for the check for NaN and Inf, whose result is a flag on
the device.
"""

import importlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor

from .layout import DenseLayout, Layout, QuantizeLayout, RandomKLayout, TopKLayout

ENVIRONMENT_VARIABLE = "THINWIRE_KERNELS"
_log = logging.getLogger("thinwire")


class Kernel(Protocol):
    """The functions of every kernel module."""

    def encode(self, tensor: Tensor, residual: Tensor | None, layout: Layout, payload: Tensor) -> bool | Tensor:
        """Write the payload of tensor + residual, and return whether the sum is finite.

        An asynchronous kernel returns an int32 tensor on the device instead, which is 1 if the sum is not finite.
        """

    def commit(self, tensor: Tensor, residual: Tensor, layout: Layout, payload: Tensor) -> None:
        """Compute residual <- tensor + residual - decode(payload)."""

    def decode(self, payloads: Tensor, layout: Layout, out: Tensor, weight: float, add: bool) -> None:
        """Compute out <- (out if add else 0) + weight * each payload."""


_STEMS: dict[type[Layout], str] = {DenseLayout: "dense", TopKLayout: "topk", QuantizeLayout: "quantize"}
# Module names, imported on first use: `import thinwire` must not load Numba or Triton.
_MODULES: dict[str, dict[type[Layout], str | Kernel]] = {
    backend: {layout: f"thinwire.kernels.{backend}.{stem}" for layout, stem in _STEMS.items()}
    for backend in ("cpu", "cuda", "reference")
}
# On a CPU, torch's copy runs at memory bandwidth as it is.
_MODULES["cpu"][DenseLayout] = _MODULES["reference"][DenseLayout]
_MODULES["reference"][RandomKLayout] = "thinwire.kernels.reference.randomk"
_DEVICES: dict[str, str | None] = {"cpu": "cpu", "cuda": "cuda", "reference": None}  # None: any device

_LARGEST_CHUNK = 1 << 14
"""Largest chunk of TopK that fits into the registers of one program of `cuda`. Longer ones are not worth a kernel."""
_LARGEST_BLOCK = 8192  # Largest block of Quantize that fits into the registers of one program of `cuda`
_OLDEST_GPU = (8, 0)

_forces: list[tuple[object, str | None]] = []  # by the `with` blocks that are open, in any thread; the last one counts


def backends() -> tuple[str, ...]:
    """Return the names that `force` and THINWIRE_KERNELS accept, in order of preference."""
    return tuple(_MODULES)


def register_kernel(backend: str, layout: type[Layout], kernel: Kernel) -> None:
    """Add the kernel of a new layout to a backend.

    A custom compressor needs a kernel for "reference". The other backends are optional.
    """
    _MODULES[_checked_name(backend)][layout] = kernel


@contextmanager
def force(backend: str | None) -> Iterator[None]:
    """Use `backend` inside a `with` block, in every thread of the process.

    >>> import torch, thinwire
    >>> with thinwire.kernels.force("reference"):
    ...     thinwire.Quantize(bits=8).compress(torch.ones(4096)).kernels
    'reference'
    """
    mine = (object(), None if backend is None else _checked_name(backend))
    _forces.append(mine)
    try:
        yield
    finally:
        _forces.remove(mine)


def select(layout: Layout, device: torch.device) -> tuple[str, Kernel]:
    """Return the name of the backend and its kernel for this layout on this device."""
    backend = _backend(device, layout.dtype, layout)
    if _forced() is None and type(layout) not in _MODULES[backend]:
        backend = "reference"
    return backend, _load(backend, type(layout), device)


def fused(kernel: Kernel, out: Tensor) -> Callable[..., None] | None:
    """Return the function `apply` of a kernel, or None if it has none, or none for a result of 16 bits.

    apply(gradient, residual, layout, payloads, own, weight, update, out) computes residual += (update or gradient) -
    payloads[own], and decodes all payloads into `out`, in one pass. The update's moments advance. The gradient is only
    read, unless it is also `out`.
    """
    return getattr(kernel, "apply", None) if out.dtype.itemsize >= 4 else None


def adam(device: torch.device, dtype: torch.dtype = torch.float32) -> ModuleType:
    """Return the kernels of `thinwire.AdamW` for moments of this dtype, from the backend that also compresses here.

    `reference.adam` defines their functions: write, advance and step.
    """
    backend = _backend(device, dtype)
    _check_device(backend, device)
    return importlib.import_module(f"thinwire.kernels.{backend}.adam")


def adam_by_numbers(device: torch.device) -> ModuleType | None:
    """Return the kernels of `adam` if they can read their numbers from GPU memory, as a recording needs, else None.

    They have one more function, numbers_of, and their `step` takes numbers in tensors.
    """
    kernel = adam(device)
    return kernel if device.type == "cuda" and hasattr(kernel, "numbers_of") else None


def check(payload: Tensor, layout: Layout) -> None:
    """Raise ValueError for a payload that no compressor could have made. The mark of an input with NaN is accepted.

    For a CPU tensor the check is fast enough for every step, unless the reference kernels are forced.
    """
    if payload.numel() != layout.nbytes:
        raise ValueError(f"a payload of {payload.numel()} bytes, expected {layout.nbytes} for {layout.numel} elements")
    on_cpu = payload.device.type == "cpu" and _forced() != "reference" and type(layout) in _MODULES["cpu"]
    for backend in ("cpu", "reference") if on_cpu else ("reference",):
        kernel = _load(backend, type(layout), payload.device)
        if hasattr(kernel, "check"):  # a layout from outside of thinwire need not have one
            kernel.check(payload, layout)
            return


def _backend(device: torch.device, dtype: torch.dtype, layout: Layout | None = None) -> str:
    """Return the backend for tensors of this dtype; `layout` is None for the update of an optimizer."""
    forced = _forced()
    backend = forced or _default(device)
    lacking = None if backend == "reference" else _lacking(backend, dtype, layout)
    if lacking is None:
        return backend
    if forced is not None:
        _warn_of_replacement(backend, lacking)
    return "reference"


def _lacking(backend: str, dtype: torch.dtype, layout: Layout | None) -> str | None:
    """Return what a backend has no kernel for, although it has one for other layouts of this class or for others."""
    if isinstance(layout, RandomKLayout):
        return "RandomK"
    if isinstance(layout, TopKLayout) and layout.record.n > _LARGEST_CHUNK:
        return f"chunks of {layout.record.n} elements"
    if backend == "cuda" and dtype == torch.float64:
        return str(dtype)
    if backend == "cuda" and isinstance(layout, QuantizeLayout) and layout.block > _LARGEST_BLOCK:
        return f"blocks of {layout.block} elements"
    return None


@cache
def _warn_of_replacement(backend: str, what: str) -> None:
    _log.warning(
        "backend %r was chosen, but has no kernel for %s: 'reference' runs, which is several times slower",
        backend, what,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _default(device: torch.device) -> str:
    if device.type == "cuda":
        why_not = _why_not_cuda(device)
        if why_not is not None:
            _log.warning(
                "tensors on %s are compressed by plain torch, which is several times slower: %s", device, why_not
            )
        return "cuda" if why_not is None else "reference"
    return "cpu" if device.type == "cpu" else "reference"


def _why_not_cuda(device: torch.device) -> str | None:
    """Return the reason why the Triton kernels cannot run here, or None if they can."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "CUDA is not available"
    if torch.cuda.get_device_capability(device) < _OLDEST_GPU:
        return f"Triton needs a GPU of compute capability {_OLDEST_GPU[0]}.{_OLDEST_GPU[1]} or newer"
    if find_spec("triton") is None or not hasattr(importlib.import_module("triton"), "constexpr_function"):
        return "Triton 3.5 or newer is needed, which comes with torch 2.9 for Linux"
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))):
        return "Triton needs a C compiler, such as gcc"
    return None


def _forced() -> str | None:
    forced = (_forces[-1][1] if _forces else None) or os.environ.get(ENVIRONMENT_VARIABLE) or None
    return None if forced is None else _checked_name(forced)


def _checked_name(backend: str) -> str:
    if backend not in _MODULES:
        raise ValueError(
            f"unknown backend {backend!r}; choose one of {', '.join(_MODULES)} "
            f"(by thinwire.kernels.force or {ENVIRONMENT_VARIABLE})"
        )
    return backend


def _check_device(backend: str, device: torch.device) -> None:
    if _DEVICES[backend] not in (None, device.type):
        raise ValueError(f"backend {backend!r} runs on {_DEVICES[backend]} tensors, given one on {device}")


def _load(backend: str, layout: type[Layout], device: torch.device) -> Kernel:
    _check_device(backend, device)
    kernel = _MODULES[backend].get(layout)
    if kernel is None:
        raise ValueError(
            f"no backend has a kernel for {layout.__name__}; register one for 'reference'"
            if backend == "reference"
            else f"backend {backend!r} has no kernel for {layout.__name__}; use 'reference'"
        )
    if isinstance(kernel, str):
        try:
            kernel = cast(Kernel, importlib.import_module(kernel))
        except Exception as error:
            raise RuntimeError(
                f"backend {backend!r} cannot be loaded: {error}. "
                f"Fix that, or choose another one with {ENVIRONMENT_VARIABLE}=reference (slower)."
            ) from error
        _MODULES[backend][layout] = kernel
    return kernel
