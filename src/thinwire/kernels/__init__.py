"""Selection of the kernels: the backend that does the arithmetic for a layout on a device.

Each backend has one kernel module per layout, with the same three functions:

    encode(tensor, residual, layout, key, payload) -> bool      payload <- C(tensor + residual); False if not finite
    commit(tensor, residual, layout, key, payload) -> None      residual <- tensor + residual - decode(payload)
    decode(payloads, layout, key, out, weight, add) -> None     out <- (out if add else 0) + weight * each payload

`encode` only reads its inputs, so nothing is lost if this rank or another one finds a NaN. An input with a NaN or Inf,
or a sum that overflows, gives the *mark*: a payload in which every stored float is NaN.

`reference` is plain torch on any device, and the specification that the other backends are tested against. `cpu` uses
Numba, `cuda` uses Triton. The default is the backend of the tensor's device. It is `reference` for other devices and
for GPUs that Triton does not support. Layouts that `cuda` does not implement always use `reference`. The function
`force` and the environment variable THINWIRE_KERNELS override the default, and a forced backend that cannot run raises
an error. The backend of each call is recorded in `CompressedTensor.kernels` and in the compressor's statistics.

The kernels of `cuda` run asynchronously. They also have the functions of `DeviceKernel`, with which the CPU does not
wait for the check for NaN and Inf.
"""

import importlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from .layout import DenseLayout, Layout, QuantizeLayout, RandomKLayout, TopKLayout

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "AdamByNumbers",
    "AdamKernel",
    "DeviceKernel",
    "Kernel",
    "SettlingKernel",
    "adam",
    "adam_by_numbers",
    "backends",
    "check",
    "force",
    "force_now",
    "is_recordable",
    "on_device",
    "register_kernel",
    "select",
    "settling",
]

ENVIRONMENT_VARIABLE = "THINWIRE_KERNELS"
_log = logging.getLogger("thinwire")


class Kernel(Protocol):
    """The functions of every kernel module."""

    def encode(self, tensor: Tensor, residual: Tensor | None, layout: Layout, key: int, payload: Tensor) -> bool:
        """Write the payload of tensor + residual, and return whether the sum is finite."""

    def commit(self, tensor: Tensor, residual: Tensor, layout: Layout, key: int, payload: Tensor) -> None:
        """Compute residual <- tensor + residual - decode(payload)."""

    def decode(self, payloads: Tensor, layout: Layout, key: int, out: Tensor, weight: float, add: bool) -> None:
        """Compute out <- (out if add else 0) + weight * each payload."""


class DeviceKernel(Protocol):
    """Additional functions of kernels that run asynchronously on a device.

    flag   int32 tensor on the device. Afterwards it is 1 if the input was not finite, else 0. `encode_flagged` requires
           it to be 0 before.
    """

    def encode_flagged(
        self, tensor: Tensor, residual: Tensor | None, layout: Layout, key: int, payload: Tensor, flag: Tensor
    ) -> None:
        """Write the payload of tensor + residual, and set the flag if the sum is not finite."""

    def compress(
        self, tensor: Tensor, residual: Tensor, layout: Layout, key: int, payload: Tensor, flag: Tensor
    ) -> None:
        """Encode and commit."""


class Update(Protocol):
    """An optimizer's update, computed from the gradient before it is sent. `updates` implements it."""

    def write(self, gradient: Tensor, out: Tensor) -> None:
        """Write the update to `out`. The gradient is only read."""

    def advance(self, gradient: Tensor, residual: Tensor | None) -> None:
        """Advance the moments, and add the update to the residual with the same bits that `write` wrote."""


class SettlingKernel(Protocol):
    """Additional function of kernels that update residual and moments in the pass that decodes."""

    def settle(
        self, gradient: Tensor, residual: Tensor, layout: Layout, key: int, payloads: Tensor, own: int, weight: float,
        update: Update | None, out: Tensor,
    ) -> None:  # fmt: skip
        """Compute residual += (update or gradient) - payloads[own], and decode all payloads into `out`.

        The update's moments advance. The gradient is only read, unless it is also `out`.
        """


class AdamKernel(Protocol):
    """The arithmetic of Adam; `reference.adam` defines it."""

    def write(
        self, g: Tensor, m: Tensor, v: Tensor, beta1: float, factor: float, scale: float, floor: float, limit: float,
        rate: float, out: Tensor,
    ) -> None:  # fmt: skip
        """Write the update to `out`."""

    def advance(
        self, g: Tensor, m: Tensor, v: Tensor, residual: Tensor | None, beta1: float, beta2: float, factor: float,
        scale: float, floor: float, limit: float, rate: float,
    ) -> None:  # fmt: skip
        """Advance the moments, and add the update to the residual."""

    def step(self, parameters: list[Tensor], updates: list[Tensor], keep: float, rates: list[float]) -> None:
        """Compute p <- keep p - rate u for every parameter p and its update u."""


class AdamByNumbers(Protocol):
    """Adam kernels that read their numbers from GPU memory, so that a recording uses those of the current step."""

    def numbers_of(
        self, beta1: float, factor: float, scale: float, floor: float, limit: float, rate: float, beta2: float
    ) -> tuple[float, ...]:
        """Return the numbers that `write` and `advance` take as `numbers`."""

    def step_by_numbers(
        self, parameters: list[Tensor], updates: list[Tensor], keep: Tensor, rates: list[Tensor]
    ) -> None:
        """Compute p <- keep p - rate u, with `keep` and `rates` in GPU memory."""


class CheckedKernel(Kernel, Protocol):
    """Kernels that can check payloads from outside: those of `reference`, and faster ones of `cpu`."""

    def check(self, payload: Tensor, layout: Layout) -> None:
        """Raise ValueError for a payload that no compressor could have made."""


# Module names, imported on first use: `import thinwire` must not load Numba or Triton.
_MODULES: dict[str, dict[type[Layout], str | Kernel]] = {
    "cpu": {
        DenseLayout: "thinwire.kernels.cpu.dense",
        TopKLayout: "thinwire.kernels.cpu.topk",
        QuantizeLayout: "thinwire.kernels.cpu.quantize",
        RandomKLayout: "thinwire.kernels.cpu.randomk",
    },
    "cuda": {
        DenseLayout: "thinwire.kernels.cuda.dense",
        TopKLayout: "thinwire.kernels.cuda.topk",
        QuantizeLayout: "thinwire.kernels.cuda.quantize",
        RandomKLayout: "thinwire.kernels.cuda.randomk",
    },
    "reference": {
        DenseLayout: "thinwire.kernels.reference.dense",
        TopKLayout: "thinwire.kernels.reference.topk",
        QuantizeLayout: "thinwire.kernels.reference.quantize",
        RandomKLayout: "thinwire.kernels.reference.randomk",
    },
}
_DEVICES: dict[str, str | None] = {"cpu": "cpu", "cuda": "cuda", "reference": None}  # None: any device

_LARGEST_BLOCK = 8192
"""Largest block of Quantize that fits into the registers of one program of `cuda`."""
_OLDEST_GPU = (8, 0)

_chosen: str | None = None  # by force_now
_forces: list[tuple[object, str | None]] = []  # by the `with` blocks that are open, in any thread; the last one counts


def backends() -> tuple[str, ...]:
    """Return the names that `force` and THINWIRE_KERNELS accept, in order of preference."""
    return tuple(_MODULES)


def register_kernel(backend: str, layout: type[Layout], kernel: Kernel) -> None:
    """Add the kernel of a new layout to a backend.

    A custom compressor needs a kernel for "reference". The other backends are optional.
    """
    _MODULES[_known(backend)][layout] = kernel


def force_now(backend: str | None) -> None:
    """Use `backend` in the whole process from now on. None restores the choice by THINWIRE_KERNELS or the default."""
    global _chosen
    _chosen = None if backend is None else _known(backend)


@contextmanager
def force(backend: str | None) -> Iterator[None]:
    """Use `backend` inside a `with` block, in every thread of the process.

    >>> import torch, thinwire
    >>> with thinwire.kernels.force("reference"):
    ...     thinwire.Quantize(bits=8).compress(torch.ones(4096)).kernels
    'reference'
    """
    mine = (object(), None if backend is None else _known(backend))
    _forces.append(mine)
    try:
        yield
    finally:
        _forces.remove(mine)


def select(layout: Layout, device: torch.device) -> tuple[str, Kernel]:
    """Return the name of the backend and its kernel for this layout on this device."""
    backend = _forced() or _default(device)
    if backend == "cuda" and not _cuda_has(layout):
        backend = "reference"
    if _forced() is None and type(layout) not in _MODULES[backend]:
        backend = "reference"
        if type(layout) not in _MODULES[backend]:
            raise ValueError(f"no backend has a kernel for {type(layout).__name__}; register one for 'reference'")
    return backend, _load(backend, type(layout), device)


def on_device(kernel: Kernel) -> DeviceKernel | None:
    """Return the kernel if it runs asynchronously on a device, else None."""
    return cast(DeviceKernel, kernel) if hasattr(kernel, "encode_flagged") else None


def is_recordable(kernel: Kernel, layout: Layout) -> bool:
    """Return whether a CUDA graph can hold this work: the CPU must not wait for the device or copy anything to it.

    Top-k searches longer chunks in several passes, with constants that are copied from the CPU.
    """
    if on_device(kernel) is None:
        return False
    return not isinstance(layout, TopKLayout) or layout.record.n <= getattr(kernel, "LARGEST_CHUNK", 0)


def settling(kernel: Kernel) -> SettlingKernel | None:
    """Return the kernel if it can commit and decode in one pass, else None."""
    return cast(SettlingKernel, kernel) if hasattr(kernel, "settle") else None


def adam(device: torch.device) -> AdamKernel:
    """Return the kernels of `thinwire.AdamW`, from the backend that also compresses on this device."""
    backend = _forced() or _default(device)
    return cast(AdamKernel, importlib.import_module(f"thinwire.kernels.{backend}.adam"))


def adam_by_numbers(device: torch.device) -> AdamByNumbers | None:
    """Return the kernels of `adam` if they can read their numbers from GPU memory, else None."""
    kernel = adam(device)
    return cast(AdamByNumbers, kernel) if device.type == "cuda" and hasattr(kernel, "step_by_numbers") else None


def check(payload: Tensor, layout: Layout) -> None:
    """Raise ValueError for a payload that no compressor could have made. The mark of an input with NaN is accepted.

    For a CPU tensor the check is fast enough for every step, unless the reference kernels are forced.
    """
    if payload.device.type == "cpu" and _forced() != "reference" and type(layout) in _MODULES["cpu"]:
        kernel = _load("cpu", type(layout), payload.device)
        if hasattr(kernel, "check"):
            cast(CheckedKernel, kernel).check(payload, layout)
            return
    reference = _load("reference", type(layout), payload.device)
    if hasattr(reference, "check"):  # a layout from outside of thinwire need not have one
        cast(CheckedKernel, reference).check(payload, layout)


def _cuda_has(layout: Layout) -> bool:
    """Return whether `cuda` implements this layout. Very long blocks and float64 are rare, and use the reference."""
    if isinstance(layout, QuantizeLayout) and layout.block > _LARGEST_BLOCK:
        return False
    return layout.dtype != torch.float64


@lru_cache(maxsize=64)
def _default(device: torch.device) -> str:
    if device.type == "cuda":
        why_not = _why_not_cuda(device)
        if why_not is not None:
            _log.warning("%s is compressed by plain torch, several times slower: %s", device, why_not)
        return "cuda" if why_not is None else "reference"
    return "cpu" if device.type == "cpu" else "reference"


def _why_not_cuda(device: torch.device) -> str | None:
    """Return the reason why the Triton kernels cannot run here, or None if they can."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "there is no CUDA"
    if torch.cuda.get_device_capability(device) < _OLDEST_GPU:
        return f"Triton wants a GPU of compute capability {_OLDEST_GPU[0]}.{_OLDEST_GPU[1]} or newer"
    if find_spec("triton") is None or not hasattr(importlib.import_module("triton"), "constexpr_function"):
        return "it takes Triton 3.5 or newer, which comes with torch 2.9 for Linux"
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))):
        return "Triton needs a C compiler, such as gcc"
    return None


def _forced() -> str | None:
    forced = (_forces[-1][1] if _forces else _chosen) or os.environ.get(ENVIRONMENT_VARIABLE) or None
    return None if forced is None else _known(forced)


def _known(backend: str) -> str:
    if backend not in _MODULES:
        raise ValueError(
            f"kernels {backend!r} do not exist; choose one of {', '.join(_MODULES)} "
            f"(by thinwire.kernels.force or {ENVIRONMENT_VARIABLE})"
        )
    return backend


def _load(backend: str, layout: type[Layout], device: torch.device) -> Kernel:
    if _DEVICES[backend] not in (None, device.type):
        raise ValueError(f"kernels {backend!r} run on {_DEVICES[backend]} tensors, given one on {device}")
    kernel = _MODULES[backend].get(layout)
    if kernel is None:
        raise ValueError(f"kernels {backend!r} have none for {layout.__name__}; use 'reference'")
    if isinstance(kernel, str):
        try:
            kernel = cast(Kernel, importlib.import_module(kernel))
        except Exception as error:
            raise RuntimeError(
                f"kernels {backend!r} were chosen but do not load: {error}. "
                f"Mend that, or choose others with {ENVIRONMENT_VARIABLE}=reference (slower)."
            ) from error
        _MODULES[backend][layout] = kernel
    return kernel
