"""The base class of all compressors: lossy arithmetic on one flat tensor, without ranks and without hidden state.

A compressor is a frozen dataclass. It chooses the layout of the payload, and the kernels do the arithmetic. This module
checks the arguments, calls the kernels and counts the calls, for all compressors. With a = tensor + residual:

    decompress(compress(tensor, residual)) + residual afterwards = a

This is exact where values are sent in 32 bits. Otherwise it holds up to the rounding of one addition. The residual also
takes the quantisation error (Seide et al. 2014, Karimireddy et al. 2019).
"""

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..kernels.layout import DTYPES, DenseLayout, Layout, residual_dtype
from .compressed import CompressedTensor
from .spec import format_spec
from .statistics import Statistics

if TYPE_CHECKING:
    from ..kernels.updates import Update

_log = logging.getLogger("thinwire")


@dataclass(frozen=True)
class Compressor(ABC):
    """Base class of the compressors. A subclass is a frozen dataclass with a `_layout` method; `TopK` is an example."""

    name: ClassVar[str]
    stats: Statistics = field(default_factory=Statistics, init=False, compare=False, repr=False)
    """Counters of this object's calls. They are not part of its identity: `==` and `hash` ignore them."""

    @abstractmethod
    def _layout(self, numel: int, dtype: torch.dtype) -> Layout:
        """Return this compressor's own layout for `numel` >= 1 elements, even if a dense one is smaller."""

    @property
    def draws(self) -> bool:
        """Return whether `compress` draws random numbers and therefore needs a `key`."""
        return False

    @property
    def sparse(self) -> bool:
        """Return whether most elements are not sent, but kept in the residual."""
        return False

    @property
    def contracts(self) -> bool:
        """Return whether the kept part is smaller than the input, so that a residual stays bounded.

        If it is not, `check_input` raises ValueError for a residual, because it would grow without bound.
        """
        return True

    def for_sum(self, ranks: int) -> "Compressor":
        """Return the compressor for a sum over `ranks` ranks, which has more nonzero elements and more levels.

        By default this is the compressor itself.
        """
        return self

    def draw_key(self, key: int | None) -> int:
        """Return the 64-bit number that all random draws of one call depend on; 0 if nothing is drawn."""
        return 0

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        """Return the layout for `numel` elements: this compressor's own, or dense if that is not larger."""
        return _layout_of(self, numel, dtype)

    def nbytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the exact payload size in bytes for `numel` elements, which never exceeds the dense size."""
        return self.layout(numel, dtype).nbytes

    def compress(
        self,
        tensor: Tensor,
        residual: Tensor | None = None,
        *,
        key: int | None = None,
        out: Tensor | None = None,
    ) -> CompressedTensor:
        """Compress tensor + residual. The part that is not sent replaces the residual, in place.

        tensor    float32, float64, float16 or bfloat16, contiguous, of any shape; only read.
        residual  same shape and device, contiguous, float32 (float64 for a float64 tensor). None: the rest is lost.
        key       integer that random draws depend on, if the compressor draws: the step, or a mix of step and tensor.
        out       uint8 buffer of `nbytes` bytes for the payload; by default a new one is allocated.

        If tensor + residual contains NaN or Inf, the residual stays unchanged, the payload decodes to NaN, and
        `.finite` of the result is False. On a GPU the CPU does not wait for this check. TopK and Quantize do everything
        in one pass there. If they find a NaN or Inf, they restore the residual up to the rounding of the addition.
        Where the tensor or the sent value was so large that the rounding erased the residual, it becomes 0.
        """
        started = time.perf_counter()
        ct, kernel = self._prepare(tensor, residual, key, out)
        finite = self._write(ct, kernel, tensor, residual, commits=residual is not None)
        self._count(ct, tensor, time.perf_counter() - started, finite)
        return ct

    def decompress(
        self,
        ct: CompressedTensor,
        out: Tensor | None = None,
        weight: float = 1.0,
        *,
        payloads: Tensor | None = None,
    ) -> Tensor:
        """Return the decoded tensor: flat and in its own dtype, or written into `out` of any float dtype.

        `weight` and `payloads` are those of `accumulate`: the result is weight * the sum of all payloads.
        """
        if out is None:
            out = torch.empty(ct.numel, dtype=ct.dtype, device=ct.payload.device)
        return self._decode(ct, out, weight, payloads, add=False)

    def accumulate(
        self, ct: CompressedTensor, out: Tensor, weight: float = 1.0, *, payloads: Tensor | None = None
    ) -> Tensor:
        """Compute out += weight * decompress(ct) without the decompressed tensor in between, and return `out`.

        payloads  uint8 tensor of shape [ranks, nbytes], such as an all-gather of every rank's `ct.payload`. They are
                  used instead of `ct.payload` and added in order, in one pass, so that every rank gets the same bits.
        """
        return self._decode(ct, out, weight, payloads, add=True)

    def encode(
        self,
        tensor: Tensor,
        residual: Tensor | None = None,
        *,
        key: int | None = None,
        out: Tensor | None = None,
        counted: bool = False,
    ) -> CompressedTensor:
        """Do the first half of `compress`: write the payload, and only read the residual.

        Use it together with `commit` if more must be known before anything may change, such as whether the gradients of
        all ranks are finite.

        counted   whether the call is counted in `stats`, as `compress` is.
        """
        started = time.perf_counter()
        ct, kernel = self._prepare(tensor, residual, key, out)
        finite = self._write(ct, kernel, tensor, residual, commits=False)
        if counted:
            self._count(ct, tensor, time.perf_counter() - started, finite)
        return ct

    def commit(self, ct: CompressedTensor, tensor: Tensor, residual: Tensor, *, finite: bool | None = None) -> None:
        """Do the second half of `compress`: residual <- tensor + residual - decompress(ct).

        `ct` must come from `encode` of the same tensor and residual, and neither may have changed since. Nothing
        changes if `ct` is not finite.

        finite    whether `ct` is finite, if that is known. Reading `ct.finite` would make the CPU wait for the GPU.
        """
        self._check_made_here(ct)
        self.check_input(tensor, residual, 0)
        if (tensor.numel(), tensor.dtype) != (ct.numel, ct.dtype):
            raise ValueError(f"tensor of {tensor.numel()} x {tensor.dtype}, expected {ct.numel} x {ct.dtype}")
        if ct.numel and (ct.finite if finite is None else finite):
            _, kernel = kernels.select(ct.layout, tensor.device)
            with torch.no_grad():
                kernel.commit(tensor, residual, ct.layout, ct.key, ct.payload)

    @torch.no_grad()
    def settle(
        self,
        ct: CompressedTensor,
        gradient: Tensor,
        residual: Tensor | None,
        payloads: Tensor,
        own: int,
        weight: float,
        update: "Update | None" = None,
        out: Tensor | None = None,
    ) -> None:
        """Commit and decode, once the payloads of all ranks have arrived and all are finite.

        `ct` is the payload of this rank, payloads[own]. The method computes residual += encoded tensor - decompress(ct)
        and out <- weight * the sum of all payloads. Kernels with a `settle` function can do this in one pass over
        memory.

        gradient  the encoded tensor; with an update, the gradient that the update was computed from. Only read, unless
                  it is also `out`.
        update    the update that was encoded, if any. Its moments advance now.
        out       contiguous, of any float dtype; by default the gradient itself.
        """
        out = gradient if out is None else out
        payloads = self._check_out(ct, out, payloads)
        _check_settled(ct, gradient, residual, update, out)
        if not ct.numel:
            return
        _, kernel = kernels.select(ct.layout, out.device)
        settling = kernels.settling(kernel)
        if settling is not None and residual is not None:
            settling.settle(gradient, residual, ct.layout, ct.key, payloads, own, float(weight), update, out)
            return
        if update is not None:
            update.advance(gradient, residual)
            if residual is not None:
                kernel.decode(payloads[own : own + 1], ct.layout, ct.key, residual, -1.0, True)
        elif residual is not None:
            kernel.commit(gradient, residual, ct.layout, ct.key, payloads[own])
        kernel.decode(payloads, ct.layout, ct.key, out, float(weight), False)

    def _prepare(
        self, tensor: Tensor, residual: Tensor | None, key: int | None, out: Tensor | None
    ) -> tuple[CompressedTensor, kernels.Kernel]:
        """Check the arguments, and return an unwritten payload and the kernel that writes it."""
        self.check_input(tensor, residual, key)
        layout = self.layout(tensor.numel(), tensor.dtype)
        payload = out if out is not None else torch.empty(layout.nbytes, dtype=torch.uint8, device=tensor.device)
        _check_buffer("out", payload, (layout.nbytes,), torch.uint8, tensor.device)
        _check_apart("out", payload, "tensor", tensor)
        if residual is not None:
            _check_apart("out", payload, "residual", residual)
        name, kernel = kernels.select(layout, tensor.device)
        return CompressedTensor(self, layout.numel, layout.dtype, self.draw_key(key), payload, name), kernel

    @torch.no_grad()
    def _write(
        self,
        ct: CompressedTensor,
        kernel: kernels.Kernel,
        tensor: Tensor,
        residual: Tensor | None,
        *,
        commits: bool,
    ) -> bool | Tensor:
        """Write the payload and, if `commits`, the residual. Return whether the input is finite.

        Asynchronous kernels return an int32 tensor on the device instead, which is 1 if the input is not finite.
        """
        if not ct.numel:
            return True
        layout = ct.layout
        on_device = kernels.on_device(kernel)
        if on_device is None:
            finite = kernel.encode(tensor, residual, layout, ct.key, ct.payload)
            if finite and commits and residual is not None:
                kernel.commit(tensor, residual, layout, ct.key, ct.payload)
            return finite
        if commits and residual is not None:
            flag = torch.empty(1, dtype=torch.int32, device=tensor.device)  # `compress` sets it to 0 first
            on_device.compress(tensor, residual, layout, ct.key, ct.payload, flag)
        else:
            flag = torch.zeros(1, dtype=torch.int32, device=tensor.device)
            on_device.encode_flagged(tensor, residual, layout, ct.key, ct.payload, flag)
        return flag

    def _count(self, ct: CompressedTensor, tensor: Tensor, seconds: float, finite: bool | Tensor) -> None:
        self.stats.add(tensor.nbytes, ct.nbytes, seconds, finite, ct.kernels)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "compress %s: %d x %s, %d -> %d bytes, %.3f ms, kernels %s%s",
                format_spec(self), ct.numel, ct.dtype, tensor.nbytes, ct.nbytes, 1e3 * seconds, ct.kernels,
                ", NOT FINITE: residual left as it was" if finite is False else "",
            )  # fmt: skip

    def _decode(
        self, ct: CompressedTensor, out: Tensor, weight: float, payloads: Tensor | None = None, *, add: bool
    ) -> Tensor:
        payloads = self._check_out(ct, out, payloads)
        if ct.numel:
            _, kernel = kernels.select(ct.layout, out.device)
            with torch.no_grad():
                kernel.decode(payloads, ct.layout, ct.key, out, float(weight), add)
        return out

    def _check_out(self, ct: CompressedTensor, out: Tensor, payloads: Tensor | None) -> Tensor:
        """Raise ValueError unless the payloads, by default that of `ct`, fit `out`. Return the payloads."""
        self._check_made_here(ct)
        if out.numel() != ct.numel or out.dtype not in DTYPES or out.device != ct.payload.device:
            raise ValueError(
                f"out holds {out.numel()} x {out.dtype} on {out.device}, "
                f"expected {ct.numel} floats on {ct.payload.device}"
            )
        if not out.is_contiguous():
            raise ValueError("out is not contiguous, expected a contiguous tensor to write into")
        if payloads is None:
            payloads = ct.payload.unsqueeze(0)
        rows = payloads.shape[0] if payloads.dim() else 0
        _check_buffer("payloads", payloads, (rows, ct.nbytes), torch.uint8, out.device)
        _check_apart("out", out, "payload", payloads)
        return payloads

    def _check_made_here(self, ct: CompressedTensor) -> None:
        if ct.compressor != self:
            raise ValueError(f"made by {format_spec(ct.compressor)}, this is {format_spec(self)}")

    def check_input(self, tensor: Tensor, residual: Tensor | None, key: int | None) -> None:
        """Raise ValueError for arguments that `compress` refuses."""
        if tensor.dtype not in DTYPES:
            raise ValueError(f"tensor of {tensor.dtype}, expected one of {', '.join(str(d) for d in DTYPES)}")
        if not tensor.is_contiguous():
            raise ValueError("tensor is not contiguous; call .contiguous() first, or flatten it")
        if residual is not None:
            if not self.contracts:
                raise ValueError(
                    f"{format_spec(self)} with a residual, which would grow for ever: its error is larger than what "
                    "comes in; use another rounding or more bits, or give no residual"
                )
            _check_buffer("residual", residual, tuple(tensor.shape), residual_dtype(tensor.dtype), tensor.device)
            _check_apart("residual", residual, "tensor", tensor)
        if self.draws and key is None:
            raise ValueError(f"{format_spec(self)} draws random numbers; give compress a key, such as the step number")


@lru_cache(maxsize=4096)
def _layout_of(compressor: Compressor, numel: int, dtype: torch.dtype) -> Layout:
    """Return `compressor.layout(numel, dtype)`, cached because every step needs it dozens of times."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}, expected one of {', '.join(str(d) for d in DTYPES)}")
    if numel < 0:
        raise ValueError(f"{numel} elements, expected 0 or more")
    dense = DenseLayout(numel, dtype)
    if numel == 0:
        return dense
    own = compressor._layout(numel, dtype)
    return own if own.nbytes < dense.nbytes else dense


def _check_buffer(name: str, given: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != device:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}, {given.dtype} on {given.device}; "
            f"expected shape {shape}, {dtype} on {device}"
        )
    if not given.is_contiguous():
        raise ValueError(f"{name} is not contiguous, expected a contiguous tensor")


def _check_settled(
    ct: CompressedTensor, gradient: Tensor, residual: Tensor | None, update: "Update | None", out: Tensor
) -> None:
    """Raise ValueError unless the tensors fit `ct`, because a kernel would access memory beyond a smaller tensor."""
    given = [("gradient", gradient, ct.dtype if update is None else gradient.dtype)]
    if residual is not None:
        given.append(("residual", residual, residual_dtype(ct.dtype)))
        _check_apart("residual", residual, "gradient", gradient)
        _check_apart("out", out, "residual", residual)
    for name, tensor, dtype in given:
        if tensor.numel() != ct.numel:
            raise ValueError(f"{name} holds {tensor.numel()} elements, expected {ct.numel}")
        _check_buffer(name, tensor, tuple(tensor.shape), dtype, out.device)
    if (gradient.data_ptr(), gradient.dtype) != (out.data_ptr(), out.dtype):
        _check_apart("out", out, "gradient", gradient)


def _check_apart(name: str, given: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if two contiguous tensors on one device overlap, because writing one would change the other."""
    first, second = sorted([given, other], key=Tensor.data_ptr)
    # A tensor without memory (empty, or on the meta device) has the address 0.
    if first.data_ptr() and first.data_ptr() + first.nbytes > second.data_ptr():
        raise ValueError(f"{name} shares the {other_name}'s memory, expected memory of its own")
