"""Common parts of the algorithms: a tensor to reduce over one group, its exchanges, and the outcome.

An algorithm is a generator. It encodes, yields the buffers to send and receive, and continues after their exchange. It
returns an `Outcome`, and has not changed tensor and residuals by then: the caller applies it, the wire exchanges.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ... import kernels
from ...compressors import CompressedTensor, Compressor
from ...kernels.joined import Flat
from ...kernels.layout import Layout
from ...kernels.updates import Update
from ..handle import Report
from ..transport.link import Buffers as Messages
from ..transport.link import Seen
from ..transport.operation import Operation


class Exchange(NamedTuple):
    """The buffers to send and receive in one exchange, by rank in the group of the operation."""

    operation: Operation
    sends: Messages
    receives: Messages


class Outcome(NamedTuple):
    """The result of an algorithm after its last exchange. No residual, moment or output has changed yet."""

    finite: bool  # no payload is marked as made from an input that was not finite; the same on all ranks
    commit: Callable[[Flat | None, Update | None], None]
    """Function (gradient, update) that updates the residuals and, with an update, the moments."""
    write: Callable[[Tensor], None]  # function (out) that writes the weighted result into a flat tensor
    commit_and_write: Callable[[Flat, Update | None, Tensor], None] | None = None
    """Function (gradient, update, out) for both at once, in one pass over memory if a kernel has one."""

    def apply(self, gradient: Flat | None, update: Update | None, out: Tensor) -> None:
        """Update residuals and moments from what was encoded, and write the result; without residual, from None."""
        if self.commit_and_write is not None and gradient is not None:
            self.commit_and_write(gradient, update, out)
        else:
            self.commit(gradient, update)
            self.write(out)


Exchanges = Generator[Exchange, Seen, Outcome]


class Buffers:
    """Memory for payloads, the same in every step. If a step is replayed on a GPU, so are the objects of `encoded`."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._made: list[CompressedTensor] = []
        self._parts: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}
        self._next = self._next_made = 0
        self.is_replayed = False  # whether a recording has already encoded the payloads of this step

    def rewind(self, *, is_replayed: bool = False) -> None:
        """Begin a new step. The next call of `next_buffer` returns the first buffer again."""
        self._next = self._next_made = 0
        self.is_replayed = is_replayed
        if not is_replayed:
            self._made = []

    def next_buffer(self, shape: tuple[int, ...], device: torch.device, *, pinned: bool = False) -> Tensor:
        if self._next == len(self._kept):
            self._kept.append(_empty(shape, device, pinned))
        elif self._kept[self._next].shape != shape:
            self._kept[self._next] = _empty(shape, device, pinned)
        self._next += 1
        return self._kept[self._next - 1]

    def parts_of(self, taken: Tensor, cut: Callable[[Tensor], Sequence[Tensor]] = list) -> Sequence[Tensor]:
        """Return views of the buffer that was taken last, by default its rows. The views are made once."""
        known = self._parts.get(self._next)
        if known is None or known[0] is not taken:
            known = self._parts[self._next] = taken, cut(taken)
        return known[1]

    def encoded(self, encode: Callable[[], CompressedTensor]) -> CompressedTensor:
        """Call `encode` and return its result. In a replay, return the result from the recording instead."""
        if self.is_replayed:
            self._next_made += 1
            return self._made[self._next_made - 1]
        self._made.append(encode())
        return self._made[-1]


def _empty(shape: tuple[int, ...], device: torch.device, pinned: bool) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="cpu" if pinned else device, pin_memory=pinned)


@dataclass(frozen=True)
class Stage:
    """A flat tensor to be summed over the ranks of one group."""

    operation: Operation
    tensor: Tensor  # Only encoding reads it. In training, its memory is reused after that.
    residual: Tensor | None
    first: Compressor
    second: Compressor
    owner_residual: Tensor | None
    key: int | None
    weight: float
    report: Report
    buffers: Buffers = field(default_factory=Buffers)
    through_host: bool = False
    """Whether payloads on a GPU are sent from, and received in, pinned memory that is kept between steps."""

    @property
    def rank(self) -> int:
        return self.operation.channel.rank

    @property
    def size(self) -> int:
        return self.operation.channel.size

    @property
    def others(self) -> list[int]:
        return self.operation.channel.others

    @property
    def layout(self) -> Layout:
        return self.first.layout(self.tensor.numel(), self.tensor.dtype)

    def encode(
        self, compressor: Compressor, tensor: Tensor, residual: Tensor | None, out: Tensor, key: int | None
    ) -> CompressedTensor:
        """Encode into `out`, and count it in the compressor's statistics. The residual is only read."""
        with self.report.clock("encode"):
            made = self.buffers.encoded(lambda: compressor.encode(tensor, residual, key=key, out=out, counted=True))
        if self.buffers.is_replayed:
            compressor.stats.add(tensor.nbytes, made.nbytes, seconds=0.0, finite=True, kernels=made.kernels)
        return made

    def on_host(self, payloads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the buffers to send from and receive in: the payloads, or pinned memory with a copy of this rank's."""
        if not self.through_host:
            return payloads
        host = self.buffers.parts_of(
            self.buffers.next_buffer((self.size, payloads[0].numel()), self.tensor.device, pinned=True)
        )
        if not self.buffers.is_replayed:
            host[self.rank].copy_(payloads[self.rank], non_blocking=True)
        return host

    def fetch(self, payloads: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        """Queue copies of other ranks' payloads to the GPU as they arrive: later, they would delay the optimizer."""
        if host is not payloads:
            torch._foreach_copy_(
                [payloads[rank] for rank in self.others], [host[rank] for rank in self.others], non_blocking=True
            )

    def commit(
        self, ct: CompressedTensor, gradient: Flat | None, residual: Tensor | None, update: Update | None
    ) -> None:
        """Update the residual after `encode` and, with an update, the moments. All ranks' inputs must be finite."""
        if update is not None and gradient is not None:
            with self.report.clock("update"):
                update.advance(gradient, residual)
            if residual is not None:
                with self.report.clock("encode"):
                    ct.compressor.accumulate(ct, residual, -1.0)
        elif residual is not None and isinstance(gradient, Tensor):
            with self.report.clock("encode"):
                ct.compressor.commit(ct, gradient, residual, finite=True)

    def check_finite(self, payloads: Sequence[Tensor], layouts: Sequence[Layout]) -> bool:
        self.check(payloads, layouts)
        return is_unmarked(payloads, layouts)

    def check(self, payloads: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
        """Raise an error that names the rank of a malformed payload; trust those of threads, and this GPU's own."""
        if self.operation.channel.group is None:
            return
        for rank, (payload, layout) in enumerate(zip(payloads, layouts, strict=True)):
            if not layout.numel or (rank == self.rank and self.tensor.is_cuda):
                continue
            try:
                kernels.check(payload.cpu(), layout)
            except ValueError as error:
                raise self.operation.malformed(rank, str(error)) from None

    def check_sums(self, sums: Sequence[Tensor]) -> None:
        """Raise an error if an owner's uncompressed sum is NaN in some elements and not in others. Inf is allowed."""
        if self.operation.channel.group is None:
            return
        for rank, part in enumerate(sums):
            if bool(part.sum().isnan()) and 0 < int(part.isnan().sum()) < part.numel():  # mostly one test is enough
                raise self.operation.malformed(rank, "some values are marked as not finite and others are not")

    def buffer(self, *shape: int) -> Tensor:
        return self.buffers.next_buffer(shape, self.tensor.device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory that is not freed while the outcome is applied on another stream."""
        return self.buffer(numel * dtype.itemsize).view(dtype)


def exchange_parts(operation: Operation, parts: Sequence[Tensor]) -> Generator[Exchange, Seen, list[Tensor]]:
    """Send this rank's part to all ranks. Return the parts of all, or their pinned copies if they were staged."""
    others, own = operation.channel.others, parts[operation.channel.rank]
    sent, received = yield Exchange(operation, dict.fromkeys(others, own), {rank: parts[rank] for rank in others})
    return [
        next(iter(sent.values()), own) if part is own else received.get(rank, part) for rank, part in enumerate(parts)
    ]


def is_unmarked(payloads: Sequence[Tensor], layouts: Sequence[Layout]) -> bool:
    """Return whether no payload is marked. A payload begins with a float, which is NaN if the input was not finite."""
    if all(payload.device.type == "cpu" for payload in payloads):
        pairs = zip(payloads, layouts, strict=True)
        return not any(layout.is_marked(payload) for payload, layout in pairs if layout.numel)
    leading = [
        payload[: layout.leading_float.itemsize].clone().view(layout.leading_float).float()
        for payload, layout in zip(payloads, layouts, strict=True)
        if layout.numel
    ]
    return not leading or not bool(torch.cat(leading).isnan().any())
