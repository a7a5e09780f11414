"""The contract every compressor keeps: lossy arithmetic on one flat tensor, without ranks and without hidden state.

A compressor is a frozen dataclass. It chooses a layout; the kernels do the arithmetic; everything a caller relies on is
here, once: what is checked, what is written, what is counted. For a = tensor + residual

    sent + kept = came in:   decompress(compress(tensor, residual)) + residual afterwards = a

exactly where values travel in 32 bits, and to the rounding of one addition otherwise. The residual takes the
quantisation error too (Seide et al. 2014, Karimireddy et al. 2019).
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
    """Makes tensors small. Subclasses are dataclasses with a `_layout`; see `TopK` for an example."""

    name: ClassVar[str]
    stats: Statistics = field(default_factory=Statistics, init=False, compare=False, repr=False)
    """What this object has done so far; no part of its identity."""

    @abstractmethod
    def _layout(self, numel: int, dtype: torch.dtype) -> Layout:
        """Where everything lies in the payload for `numel` >= 1 entries, were it to be used."""

    @property
    def draws(self) -> bool:
        """Whether `compress` needs a `key` to draw random numbers from."""
        return False

    @property
    def sparse(self) -> bool:
        """Whether most entries are not sent at all, but wait in the residual."""
        return False

    @property
    def contracts(self) -> bool:
        """Whether less is kept than came in. Otherwise a residual would grow for ever, and is refused."""
        return True

    def for_sum(self, ranks: int) -> "Compressor":
        """What the owner of a sum over `ranks` sends it on with: the sum has more entries and more levels."""
        return self

    def draw_key(self, key: int | None) -> int:
        """The 64-bit number that all draws of one call depend on."""
        return 0

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        """The layout for `numel` entries: this compressor's own, or dense where that would not be larger."""
        return _layout_of(self, numel, dtype)

    def nbytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Exact size of the payload for `numel` entries; needs no data and is never above dense."""
        return self.layout(numel, dtype).nbytes

    def compress(
        self,
        tensor: Tensor,
        residual: Tensor | None = None,
        *,
        key: int | None = None,
        out: Tensor | None = None,
    ) -> CompressedTensor:
        """Send the best of tensor + residual, and keep the rest in `residual`, in place.

        tensor    float32, float64, float16 or bfloat16, contiguous, of any shape; only read.
        residual  same shape and device, contiguous, float32 (float64 for a float64 tensor). None: the rest is lost.
        key       what the draw depends on, for compressors that draw: the step number, or a mix of step and tensor.
        out       uint8 buffer of `nbytes` for the payload, else a new one.

        If tensor + residual holds NaN or Inf anywhere, the residual is left as it was, the payload decodes to NaN, and
        `.finite` of the result is False. On a GPU nothing waits for that: one pass does all, and if it meets a NaN the
        residual is taken back, to the rounding of the addition (where the tensor or what was sent drowned it, to 0).
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
        """The tensor that was sent: flat, of its own dtype, or written into `out` of any float dtype and shape.

        weight and payloads are those of `accumulate`: the sum of all payloads, as if `out` had been zero.
        """
        if out is None:
            out = torch.empty(ct.numel, dtype=ct.dtype, device=ct.payload.device)
        return self._decode(ct, out, weight, payloads, add=False)

    def accumulate(
        self, ct: CompressedTensor, out: Tensor, weight: float = 1.0, *, payloads: Tensor | None = None
    ) -> Tensor:
        """out += weight * decompress(ct), without the tensor in between.

        payloads  [ranks, nbytes] uint8, such as an all-gather of every rank's `ct.payload`: all of them are added, in
                  their order, in one pass, so that every rank gets the same bits.
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
        """The first half of `compress`: the payload, with the residual only read.

        For a caller who must know more before anything may change, such as whether every rank's gradient is finite.

        counted   in `stats`, as `compress` is.
        """
        started = time.perf_counter()
        ct, kernel = self._prepare(tensor, residual, key, out)
        finite = self._write(ct, kernel, tensor, residual, commits=False)
        if counted:
            self._count(ct, tensor, time.perf_counter() - started, finite)
        return ct

    def commit(self, ct: CompressedTensor, tensor: Tensor, residual: Tensor, *, finite: bool | None = None) -> None:
        """The second half: residual <- tensor + residual - decompress(ct); nothing if `ct` is not finite.

        `ct` must come from `encode` of the same tensor and residual, and neither may have changed since.

        finite    whether `ct` is, for a caller who knows: to look would make the host wait for a GPU.
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
        """What follows once every rank's payload is there, and all are finite: `ct` is payloads[own].

        The residual takes what was encoded, less what `ct` decodes to; out <- weight * the sum of all payloads. In one
        pass over the memory where a kernel can.

        gradient  what was encoded, or with an update, what that was made of; only read, unless it is `out` too.
        update    what was encoded is what this wrote; its moments advance now.
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
        """A payload that is yet to be written, and the kernel that writes it."""
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
        """Write the payload, and if it `commits` the residual too.

        Whether it is finite; where only the device knows, an int32 there that is 1 if not.
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
            flag = torch.empty(1, dtype=torch.int32, device=tensor.device)  # which `compress` begins with
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
        """ValueError unless the payloads, by default that of `ct`, can be decoded into `out`; returns the payloads."""
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
        """ValueError for what `compress` would refuse."""
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
    """Kept, because an exchange asks for it dozens of times, and every step asks again."""
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
    """What `settle` reads and writes besides the payloads: a kernel would go beyond the end of a smaller tensor."""
    given = [("gradient", gradient, ct.dtype if update is None else gradient.dtype)]
    if residual is not None:
        given.append(("residual", residual, residual_dtype(ct.dtype)))
        _check_apart("residual", residual, "gradient", gradient)
        _check_apart("out", out, "residual", residual)
    for name, tensor, dtype in given:
        if tensor.numel() != ct.numel:
            raise ValueError(f"{name} holds {tensor.numel()} entries, expected {ct.numel}")
        _check_buffer(name, tensor, tuple(tensor.shape), dtype, out.device)
    if (gradient.data_ptr(), gradient.dtype) != (out.data_ptr(), out.dtype):
        _check_apart("out", out, "gradient", gradient)


def _check_apart(name: str, given: Tensor, other_name: str, other: Tensor) -> None:
    """Contiguous tensors on one device must not overlap: writing one would change the other."""
    first, second = sorted([given, other], key=Tensor.data_ptr)
    # A tensor without memory (empty, or on the meta device) has the address 0.
    if first.data_ptr() and first.data_ptr() + first.nbytes > second.data_ptr():
        raise ValueError(f"{name} shares the {other_name}'s memory, expected memory of its own")
