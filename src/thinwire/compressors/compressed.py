"""CompressedTensor: a payload together with everything that `decompress` needs."""

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
    """The interface of the compressor that made a payload. Every `Compressor` has it."""

    @property
    def draws(self) -> bool:
        """Return whether the compressor draws random numbers."""

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        """Return the layout of the payload for `numel` elements."""

    def nbytes(self, numel: int, dtype: torch.dtype = ...) -> int:
        """Return the payload size in bytes for `numel` elements."""

    def decompress(
        self, ct: "CompressedTensor", out: Tensor | None = None, weight: float = 1.0, *, payloads: Tensor | None = None
    ) -> Tensor:
        """Return the decoded tensor; see `Compressor.decompress`."""

    def accumulate(
        self, ct: "CompressedTensor", out: Tensor, weight: float = 1.0, *, payloads: Tensor | None = None
    ) -> Tensor:
        """Add the decoded tensor to `out`; see `Compressor.accumulate`."""

    def commit(self, ct: "CompressedTensor", tensor: Tensor, residual: Tensor, *, finite: bool | None = None) -> None:
        """Update the residual; see `Compressor.commit`."""


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

    compressor: Codec
    numel: int
    dtype: torch.dtype
    key: int
    payload: Tensor = field(repr=False)
    """The encoded bytes: a one-dimensional uint8 tensor on the device of the original tensor."""
    kernels: str
    """The backend that encoded the payload: "reference", "cpu" or "cuda"; "frame" if it was read from bytes."""

    @property
    def layout(self) -> Layout:
        """Return the layout of the payload."""
        return self.compressor.layout(self.numel, self.dtype)

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
        if self.numel == 0:
            return True
        leading = self.layout.leading_float
        return not bool(self.payload[: leading.itemsize].clone().view(leading).isnan())

    def decompress(self, out: Tensor | None = None) -> Tensor:
        """Return `compressor.decompress(self, out)`."""
        return self.compressor.decompress(self, out)

    def to_bytes(self) -> bytes:
        """Return a self-contained frame: header, checksum and payload."""
        payload = self.payload.cpu().numpy().tobytes()
        dtype = str(self.dtype).removeprefix("torch.")
        return frame.pack(Frame(format_spec(self.compressor), dtype, self.numel, self.key, payload))

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
