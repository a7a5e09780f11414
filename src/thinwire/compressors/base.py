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
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..kernels.joined import Flat, tensors_of
from ..kernels.layout import DTYPES, DenseLayout, Layout, residual_dtype
from ..kernels.updates import Update
from . import frame
from .frame import Frame, FrameError
from .spec import format_spec, parse_spec
from .statistics import Statistics

_log = logging.getLogger("thinwire")


@dataclass(frozen=True, eq=False)
class CompressedTensor:
    """A payload of fixed size, and the information that is needed to decode it.

    >>> import torch, thinwire
    >>> ct = thinwire.TopK(ratio="1/64", bits=2).compress(torch.randn(100_000))
    >>> ct.nbytes, len(ct.to_bytes())
    (2054, 2123)
    >>> thinwire.CompressedTensor.from_bytes(ct.to_bytes()).decompress().shape
    torch.Size([100000])
    """

    compressor: "Compressor"
    numel: int
    dtype: torch.dtype
    key: int
    payload: Tensor = field(repr=False)
    """The encoded bytes: a one-dimensional uint8 tensor on the device of the original tensor."""
    kernels: str
    """The backend that encoded the payload: "reference", "cpu" or "cuda"; "frame" if it was read from bytes."""

    @property
    def layout(self) -> Layout:
        return self.compressor.layout(self.numel, self.dtype).with_key(self.key)

    @property
    def nbytes(self) -> int:
        """Return the payload size in bytes. A collective sends only these, as ranks agree on the rest before."""
        return self.payload.numel()

    @property
    def finite(self) -> bool:
        """Return False if the input contained NaN or Inf: the payload decodes to NaN, the residual is unchanged.

        Reading this property waits for the device. Inside a step it need not be read, because the NaN is sent and every
        rank finds it in the sum.
        """
        return self.numel == 0 or not self.layout.is_marked(self.payload)

    def decompress(self, out: Tensor | None = None) -> Tensor:
        return self.compressor.decompress(self, out)

    def to_bytes(self) -> bytes:
        """Return a self-contained frame: header, checksum and payload."""
        spec, dtype = format_spec(self.compressor), str(self.dtype).removeprefix("torch.")
        return frame.pack(Frame(spec, dtype, self.numel, key=self.key, payload=self.payload.cpu().numpy().tobytes()))

    @staticmethod
    def from_bytes(data: frame.Buffer, *, numel: int | None = None) -> "CompressedTensor":
        """Read a frame. Raises `FrameError`, with the reason, for bytes that are not a valid frame.

        A frame of a few bytes can describe a huge tensor. For data from an untrusted source, pass the expected `numel`,
        or check `numel` before decompressing.
        """
        read = frame.unpack(data)
        if numel is not None and read.numel != numel:
            raise FrameError(f"{read.numel} elements, expected {numel}")
        try:
            compressor = cast(Compressor, parse_spec(read.spec))
        except ValueError as error:
            raise FrameError(str(error)) from error
        if format_spec(compressor) != read.spec:
            raise FrameError(f"spec {read.spec!r}, expected its canonical form {format_spec(compressor)!r}")
        if read.key and not compressor.draws:
            raise FrameError(f"key {read.key}, expected 0: {read.spec.partition(':')[0]} draws nothing")
        dtype: torch.dtype = getattr(torch, read.dtype)
        expected = compressor.nbytes(read.numel, dtype)
        if len(read.payload) != expected:
            raise FrameError(f"payload of {len(read.payload)} bytes, expected {expected} for {read.numel} elements")
        payload = torch.from_numpy(np.array(read.payload, dtype=np.uint8))
        try:
            if expected:
                kernels.check(payload, compressor.layout(read.numel, dtype))
        except ValueError as error:
            raise FrameError(f"payload: {error}") from error
        return CompressedTensor(compressor, read.numel, dtype, key=read.key, payload=payload, kernels="frame")


@dataclass(frozen=True)
class Compressor(ABC):
    """Base class of the compressors. A subclass is a frozen dataclass with a `_layout` method; `TopK` is an example."""

    name: ClassVar[str]
    sparse: ClassVar[bool] = False  # Whether most elements are not sent, but kept in the residual
    draws: ClassVar[bool] = False
    """Whether `compress` draws random numbers, the same on all ranks, and therefore needs a `key`."""
    stats: Statistics = field(default_factory=Statistics, init=False, compare=False, repr=False)
    """Counters of this object's calls. They are not part of its identity: `==` and `hash` ignore them."""

    @abstractmethod
    def _layout(self, numel: int, dtype: torch.dtype) -> Layout:
        """Return this compressor's own layout for `numel` >= 1 elements, even if a dense one is smaller."""

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
        self, tensor: Tensor, residual: Tensor | None = None, *, key: int | None = None, out: Tensor | None = None
    ) -> CompressedTensor:
        """Compress tensor + residual. The part that is not sent replaces the residual, in place.

        tensor    float32, float64, float16 or bfloat16, contiguous, of any shape; only read.
        residual  same shape and device, contiguous, float32 (float64 for a float64 tensor). None: the rest is lost.
        key       integer that random draws depend on, if the compressor draws: the step, or a mix of step and tensor.
        out       uint8 buffer of `nbytes` bytes for the payload; by default a new one is allocated.

        If tensor + residual contains NaN or Inf, the residual stays unchanged, the payload decodes to NaN, and
        `.finite` of the result is False. With a residual on a GPU, this check waits for the device.
        """
        ct = self.encode(tensor, residual, key=key, out=out, counted=True)
        if residual is not None:
            self.commit(ct, tensor, residual)
        return ct

    def decompress(
        self, ct: CompressedTensor, out: Tensor | None = None, weight: float = 1.0, *, payloads: Tensor | None = None
    ) -> Tensor:
        """Return the decoded tensor: flat and in its own dtype, or written into `out` of any float dtype.

        `weight` and `payloads` are those of `accumulate`: the result is weight * the sum of all payloads.
        """
        if out is None:
            out = torch.empty(ct.numel, dtype=ct.dtype, device=ct.payload.device)
        return self._decode(ct, out=out, weight=weight, payloads=payloads, add=False)

    def accumulate(
        self, ct: CompressedTensor, out: Tensor, weight: float = 1.0, *, payloads: Tensor | None = None
    ) -> Tensor:
        """Compute out += weight * decompress(ct) without the decompressed tensor in between, and return `out`.

        payloads  uint8 tensor of shape [ranks, nbytes], such as an all-gather of every rank's `ct.payload`. They are
                  used instead of `ct.payload` and added in order, in one pass, so that every rank gets the same bits.
        """
        return self._decode(ct, out=out, weight=weight, payloads=payloads, add=True)

    @torch.no_grad()
    def encode(
        self, tensor: Tensor, residual: Tensor | None = None, *,
        key: int | None = None, out: Tensor | None = None, counted: bool = False,
    ) -> CompressedTensor:  # fmt: skip
        """Do the first half of `compress`: write the payload, and only read the residual. It does not wait for a GPU.

        Use it together with `commit` if more must be known before anything may change, such as whether the gradients of
        all ranks are finite.

        counted   whether the call is counted in `stats`, as `compress` is.
        """
        started = time.perf_counter()
        self.check_input(tensor, residual, key)
        layout = self.layout(tensor.numel(), tensor.dtype)
        payload = out if out is not None else torch.empty(layout.nbytes, dtype=torch.uint8, device=tensor.device)
        _check_buffer("out", given=payload, shape=(layout.nbytes,), dtype=torch.uint8, device=tensor.device)
        _check_apart("out", given=payload, other_name="tensor", other=tensor)
        if residual is not None:
            _check_apart("out", given=payload, other_name="residual", other=residual)
        name, kernel = kernels.select(layout, tensor.device)
        drawn = self.draw_key(key)
        ct = CompressedTensor(self, layout.numel, layout.dtype, key=drawn, payload=payload, kernels=name)
        finite = True if not ct.numel else kernel.encode(tensor, residual, ct.layout, payload)
        if counted:
            self._count(ct, tensor=tensor, seconds=time.perf_counter() - started, finite=finite)
        return ct

    @torch.no_grad()
    def encode_again(self, ct: CompressedTensor, tensor: Tensor, residual: Tensor | None) -> None:
        """Encode into the payload of `ct`, a result of `encode` for tensors like these; nothing is checked again."""
        started = time.perf_counter()
        _, kernel = kernels.select(ct.layout, tensor.device)
        finite = True if not ct.numel else kernel.encode(tensor, residual, ct.layout, ct.payload)
        self._count(ct, tensor=tensor, seconds=time.perf_counter() - started, finite=finite)

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
                kernel.commit(tensor, residual, ct.layout, ct.payload)

    @torch.no_grad()
    def apply(
        self, ct: CompressedTensor, gradient: Flat, residual: Tensor | None, payloads: Tensor, own: int, weight: float,
        update: Update | None = None, out: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Commit and decode, once the payloads of all ranks have arrived and all are finite.

        `ct` is the payload of this rank, payloads[own]. The method computes residual += encoded tensor - decompress(ct)
        and out <- weight * the sum of all payloads, in one pass over memory if the kernel has one.

        gradient  the encoded tensor; with an update, the gradient that the update was computed from. Only read, unless
                  it is also `out`.
        update    the update that was encoded, if any. Its moments advance now.
        out       contiguous, of any float dtype; by default the gradient itself.
        """
        if out is None:
            assert isinstance(gradient, Tensor)
            out = gradient
        payloads = self._check_out(ct, out, payloads)
        if not 0 <= own < len(payloads):
            raise ValueError(f"own {own}, expected the place of this rank's payload, 0 to {len(payloads) - 1}")
        self._check_applied(ct, gradient, residual, is_update=update is not None, out=out)
        if not ct.numel:
            return
        _, kernel = kernels.select(ct.layout, out.device)
        apply, weight = kernels.fused(kernel, out), float(weight)
        if apply is not None and residual is not None and isinstance(gradient, Tensor):
            apply(gradient, residual, ct.layout, payloads=payloads, own=own, weight=weight, update=update, out=out)
            return
        if update is not None:
            update.advance(gradient, residual)
            if residual is not None:
                kernel.decode(payloads[own : own + 1], ct.layout, residual, weight=-1.0, add=True)
        elif residual is not None:
            assert isinstance(gradient, Tensor)
            kernel.commit(gradient, residual, ct.layout, payloads[own])
        kernel.decode(payloads, ct.layout, out, weight=weight, add=False)

    def _count(self, ct: CompressedTensor, tensor: Tensor, seconds: float, finite: bool | Tensor) -> None:
        self.stats.add(tensor.nbytes, ct.nbytes, seconds=seconds, finite=finite, kernels=ct.kernels)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                f"compress {format_spec(self)}: {ct.numel} x {ct.dtype}, {tensor.nbytes} -> {ct.nbytes} bytes, "
                f"{1e3 * seconds:.3f} ms, kernels {ct.kernels}"
                + (", NOT FINITE: residual left as it was" if finite is False else "")
            )

    def _decode(
        self, ct: CompressedTensor, out: Tensor, weight: float, payloads: Tensor | None = None, *, add: bool
    ) -> Tensor:
        payloads = self._check_out(ct, out, payloads)
        if ct.numel:
            _, kernel = kernels.select(ct.layout, out.device)
            with torch.no_grad():
                kernel.decode(payloads, ct.layout, out, weight=float(weight), add=add)
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
        _check_buffer("payloads", given=payloads, shape=(rows, ct.nbytes), dtype=torch.uint8, device=out.device)
        _check_apart("out", given=out, other_name="payload", other=payloads)
        return payloads

    def _check_made_here(self, ct: CompressedTensor) -> None:
        if ct.compressor != self:
            raise ValueError(f"the payload was made by {format_spec(ct.compressor)}, expected {format_spec(self)}")

    def _check_applied(
        self, ct: CompressedTensor, gradient: Flat, residual: Tensor | None, *, is_update: bool, out: Tensor
    ) -> None:
        for name, holder in (("gradient", gradient), ("residual", residual)):
            if holder is not None and holder.numel() != ct.numel:  # a kernel would access memory beyond a smaller one
                raise ValueError(f"{name} holds {holder.numel()} elements, expected {ct.numel}")
        if residual is not None:
            _check_apart("out", given=out, other_name="residual", other=residual)
            wide = residual_dtype(ct.dtype)
            _check_buffer("residual", given=residual, shape=tuple(residual.shape), dtype=wide, device=out.device)
        for piece in tensors_of(gradient):
            if residual is not None:
                _check_apart("residual", given=residual, other_name="gradient", other=piece)
            if (piece.data_ptr(), piece.dtype) != (out.data_ptr(), out.dtype):
                _check_apart("out", given=out, other_name="gradient", other=piece)
            dtype = gradient.dtype if is_update else ct.dtype
            _check_buffer("gradient", given=piece, shape=tuple(piece.shape), dtype=dtype, device=out.device)

    def check_input(self, tensor: Tensor, residual: Tensor | None, key: int | None) -> None:
        """Raise ValueError for arguments that `compress` refuses."""
        if tensor.dtype not in DTYPES:
            raise ValueError(f"tensor of {tensor.dtype}, expected one of {', '.join(str(d) for d in DTYPES)}")
        if not tensor.is_contiguous():
            raise ValueError("tensor is not contiguous; call .contiguous() first, or flatten it")
        if residual is not None:
            wide = residual_dtype(tensor.dtype)
            _check_buffer("residual", given=residual, shape=tuple(tensor.shape), dtype=wide, device=tensor.device)
            _check_apart("residual", given=residual, other_name="tensor", other=tensor)
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
    """Raise ValueError unless the tensor is contiguous, and has this shape, dtype and device."""
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != device:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}, {given.dtype} on {given.device}; "
            f"expected shape {shape}, {dtype} on {device}"
        )
    if not given.is_contiguous():
        raise ValueError(f"{name} is not contiguous, expected a contiguous tensor")


def _check_apart(name: str, given: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if two contiguous tensors on one device overlap, because writing one would change the other."""
    first, second = sorted([given, other], key=Tensor.data_ptr)
    # A tensor without memory (empty, or on the meta device) has the address 0.
    if first.data_ptr() and first.data_ptr() + first.nbytes > second.data_ptr():
        raise ValueError(f"{name} shares the {other_name}'s memory, expected memory of its own")
