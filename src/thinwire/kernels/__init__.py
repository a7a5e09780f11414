"""Which code does the arithmetic: an explicit choice, never a silent one.

Each backend has one kernel module per layout, with the same three functions:

    encode(tensor, residual, layout, key, payload) -> bool      payload <- C(tensor + residual); False if not finite
    commit(tensor, residual, layout, key, payload) -> None      residual <- tensor + residual - decode(payload)
    decode(payloads, layout, key, out, weight, add) -> None     out <- (out if add else 0) + weight * each payload

`encode` only reads, so that a caller who learns of a NaN anywhere, on this rank or another, has lost nothing. An input
with a NaN or Inf, or a sum that overflows, makes the *mark*: a payload in which every stored float is NaN.

`reference` is plain torch on any device, and the specification the others are tested against; `cpu` is Numba, `cuda`
Triton. The default is that of the tensor's device, and `reference` for other devices, for GPUs that Triton does not
know, and for the few layouts that `cuda` leaves to it. `force("reference")` or the environment variable
THINWIRE_KERNELS overrides it, and a forced backend that cannot run raises. What ran is recorded in
`CompressedTensor.kernels` and in the compressor's statistics.

A backend whose device works on its own, `cuda`, is a `DeviceKernel`: it never makes the host wait to learn whether an
input was finite.
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
    """What every kernel module provides; the package docstring says what each function does."""

    def encode(self, tensor: Tensor, residual: Tensor | None, layout: Layout, key: int, payload: Tensor) -> bool: ...

    def commit(self, tensor: Tensor, residual: Tensor, layout: Layout, key: int, payload: Tensor) -> None: ...

    def decode(self, payloads: Tensor, layout: Layout, key: int, out: Tensor, weight: float, add: bool) -> None: ...


class DeviceKernel(Protocol):
    """Kernels of a device that works on its own. flag: an int32 there, 1 afterwards if not finite, else 0.

    `encode_flagged` wants it to be 0 before.
    """

    def encode_flagged(
        self, tensor: Tensor, residual: Tensor | None, layout: Layout, key: int, payload: Tensor, flag: Tensor
    ) -> None: ...

    def compress(
        self, tensor: Tensor, residual: Tensor, layout: Layout, key: int, payload: Tensor, flag: Tensor
    ) -> None:
        """encode and commit."""


class Update(Protocol):
    """What an optimizer makes of a gradient before it is sent: those of `updates`."""

    def write(self, gradient: Tensor, out: Tensor) -> None:
        """Write the update; the gradient is only read."""

    def advance(self, gradient: Tensor, residual: Tensor | None) -> None:
        """Bring the moments up to date, and add to the residual what `write` wrote, bit for bit."""


class SettlingKernel(Protocol):
    """Kernels that bring residual and moments up to date in the pass that decodes."""

    def settle(
        self, gradient: Tensor, residual: Tensor, layout: Layout, key: int, payloads: Tensor, own: int, weight: float,
        update: Update | None, out: Tensor,
    ) -> None:  # fmt: skip
        """residual += update, or the gradient if there is none; residual -= payloads[own]; decode into `out`.

        The update's moments advance. The gradient is only read, unless it is `out` too.
        """


class AdamKernel(Protocol):
    """The optimizer's own arithmetic; `reference.adam` says what it is."""

    def write(
        self, g: Tensor, m: Tensor, v: Tensor, beta1: float, factor: float, scale: float, floor: float, limit: float,
        rate: float, out: Tensor,
    ) -> None: ...  # fmt: skip

    def advance(
        self, g: Tensor, m: Tensor, v: Tensor, residual: Tensor | None, beta1: float, beta2: float, factor: float,
        scale: float, floor: float, limit: float, rate: float,
    ) -> None: ...  # fmt: skip

    def step(self, parameters: list[Tensor], updates: list[Tensor], keep: float, rates: list[float]) -> None: ...


class AdamByNumbers(Protocol):
    """The same, by numbers that are in the memory of a GPU: a recording of it finds those of its step there."""

    def numbers_of(
        self, beta1: float, factor: float, scale: float, floor: float, limit: float, rate: float, beta2: float
    ) -> tuple[float, ...]:
        """Return those of `write` and `advance`, which take them as `numbers`."""

    def step_by_numbers(
        self, parameters: list[Tensor], updates: list[Tensor], keep: Tensor, rates: list[Tensor]
    ) -> None: ...


class CheckedKernel(Kernel, Protocol):
    """What the reference provides besides, and `cpu` in a quick version: the judge of bytes that came from outside."""

    def check(self, payload: Tensor, layout: Layout) -> None: ...


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

_LARGEST_RECORDED_CHUNK = 1 << 14
"""Of top-k: longer ones are searched in several passes, with constants that are copied from the host."""
_LARGEST_BLOCK = 8192
"""Of Quantize, that the registers of one program of `cuda` hold."""
_OLDEST_GPU = (8, 0)

_chosen: str | None = None  # by force_now
_forces: list[tuple[object, str | None]] = []  # by the `with` blocks that are open, in any thread; the last one counts


def backends() -> tuple[str, ...]:
    """The names that `force` and THINWIRE_KERNELS accept, in the order of preference."""
    return tuple(_MODULES)


def register_kernel(backend: str, layout: type[Layout], kernel: Kernel) -> None:
    """Add the kernel of a new layout to a backend.

    A compressor of your own needs one for "reference"; the others are optional.
    """
    _MODULES[_known(backend)][layout] = kernel


def force_now(backend: str | None) -> None:
    """Use `backend` from now on in the whole process; None leaves the choice to THINWIRE_KERNELS or the default."""
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
    """The backend's name and its kernel for this layout on this device."""
    backend = _forced() or _default(device)
    if backend == "cuda" and not _cuda_has(layout):
        backend = "reference"
    if _forced() is None and type(layout) not in _MODULES[backend]:
        backend = "reference"
        if type(layout) not in _MODULES[backend]:
            raise ValueError(f"no backend has a kernel for {type(layout).__name__}; register one for 'reference'")
    return backend, _load(backend, type(layout), device)


def on_device(kernel: Kernel) -> DeviceKernel | None:
    """The kernel, if it is one of a device that works on its own."""
    return cast(DeviceKernel, kernel) if hasattr(kernel, "encode_flagged") else None


def is_recordable(layout: Layout, device: torch.device) -> bool:
    """Whether encoding and decoding can be recorded as a CUDA graph: the host neither waits nor copies anything."""
    _, kernel = select(layout, device)
    if device.type != "cuda" or on_device(kernel) is None:
        return False
    records = [layout.record, layout.tail] if isinstance(layout, TopKLayout) else []
    return all(record is None or record.n <= _LARGEST_RECORDED_CHUNK for record in records)


def settling(kernel: Kernel) -> SettlingKernel | None:
    """The kernel, if it commits and decodes in one pass."""
    return cast(SettlingKernel, kernel) if hasattr(kernel, "settle") else None


def adam(device: torch.device) -> AdamKernel:
    """The kernels of `thinwire.AdamW`, of the same backend that compresses."""
    backend = _forced() or _default(device)
    return cast(AdamKernel, importlib.import_module(f"thinwire.kernels.{backend}.adam"))


def adam_by_numbers(device: torch.device) -> AdamByNumbers | None:
    """The same, if they read their numbers from the memory of the device."""
    kernel = adam(device)
    return cast(AdamByNumbers, kernel) if device.type == "cuda" and hasattr(kernel, "step_by_numbers") else None


def check(payload: Tensor, layout: Layout) -> None:
    """Raise ValueError for a payload that no compressor could have made; the mark of an input with NaN is accepted.

    In host memory it is quick enough for every step, unless the reference kernels are forced.
    """
    if payload.device.type == "cpu" and _forced() != "reference" and type(layout) in _MODULES["cpu"]:
        kernel = _load("cpu", type(layout), payload.device)
        if hasattr(kernel, "check"):
            cast(CheckedKernel, kernel).check(payload, layout)
            return
    cast(CheckedKernel, _load("reference", type(layout), payload.device)).check(payload, layout)


def _cuda_has(layout: Layout) -> bool:
    """What nobody sends gradients in, or as, is left to the reference."""
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
    """What the Triton kernels lack here."""
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
