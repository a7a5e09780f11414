"""CompressedTensor: what a compressor makes, and what `decompress` needs to undo it."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .. import kernels
from ..kernels.layout import Layout
from . import frame
from .frame import Frame, FrameError
from .spec import format_spec, parse_spec


class Codec(Protocol):
    """What made a payload, and can read it: a `Compressor`."""

    @property
    def draws(self) -> bool: ...

    def layout(self, numel: int, dtype: torch.dtype) -> Layout: ...

    def nbytes(self, numel: int, dtype: torch.dtype = ...) -> int: ...

    def decompress(
        self, ct: "CompressedTensor", out: Tensor | None = None, weight: float = 1.0, *, payloads: Tensor | None = None
    ) -> Tensor: ...

    def accumulate(
        self, ct: "CompressedTensor", out: Tensor, weight: float = 1.0, *, payloads: Tensor | None = None
    ) -> Tensor: ...

    def commit(
        self, ct: "CompressedTensor", tensor: Tensor, residual: Tensor, *, finite: bool | None = None
    ) -> None: ...


@dataclass(frozen=True, eq=False)
class CompressedTensor:
    """A payload of fixed size, and what is needed to read it.

    >>> import torch, thinwire
    >>> ct = thinwire.TopK(ratio="1/64", bits=2).compress(torch.randn(100_000))
    >>> ct.nbytes, len(ct.to_bytes())
    (2054, 2123)
    >>> thinwire.CompressedTensor.from_bytes(ct.to_bytes()).decompress().shape
    torch.Size([100000])
    """

    compressor: Codec
    numel: int
    dtype: torch.dtype
    key: int
    payload: Tensor = field(repr=False)
    """uint8, one-dimensional, on the tensor's device."""
    kernels: str
    """The backend that made it: "reference", "cpu", …, or "frame" if it was read from bytes."""

    @property
    def layout(self) -> Layout:
        return self.compressor.layout(self.numel, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload: what a collective sends, where ranks agreed on the rest before."""
        return self.payload.numel()

    @property
    def finite(self) -> bool:
        """False if the input held NaN or Inf; the payload then decodes to NaN and the residual was left alone.

        Reading it waits for the device. Inside a step, let the NaN travel: every rank finds it in the sum.
        """
        if self.numel == 0:
            return True
        leading = self.layout.leading_float
        return not bool(self.payload[: leading.itemsize].clone().view(leading).isnan())

    def decompress(self, out: Tensor | None = None) -> Tensor:
        """The same as `compressor.decompress(self, out)`."""
        return self.compressor.decompress(self, out)

    def to_bytes(self) -> bytes:
        """A frame that stands alone: header, checksum, payload."""
        payload = self.payload.cpu().numpy().tobytes()
        dtype = str(self.dtype).removeprefix("torch.")
        return frame.pack(Frame(format_spec(self.compressor), dtype, self.numel, self.key, payload))

    @staticmethod
    def from_bytes(data: frame.Buffer, *, numel: int | None = None) -> "CompressedTensor":
        """Read a frame; `FrameError` says why these bytes are not one.

        A frame of a few bytes may stand for a huge tensor: give the `numel` that you expect, or look at it before you
        decompress what a stranger sent.
        """
        read = frame.unpack(data)
        if numel is not None and read.numel != numel:
            raise FrameError(f"{read.numel} elements, expected {numel}")
        try:
            compressor: Codec = parse_spec(read.spec)
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
        if not expected:
            return CompressedTensor(compressor, 0, dtype, read.key, torch.empty(0, dtype=torch.uint8), "frame")
        payload = torch.frombuffer(bytearray(read.payload), dtype=torch.uint8)
        try:
            kernels.check(payload, compressor.layout(read.numel, dtype))
        except ValueError as error:
            raise FrameError(f"payload: {error}") from error
        return CompressedTensor(compressor, read.numel, dtype, read.key, payload, "frame")
