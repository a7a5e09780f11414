"""What the algorithms have in common: a part of a tensor to reduce over one group, and what came of it.

An algorithm is a generator. It encodes, yields what is to be sent and received, is given what came, and so on; what it
returns is an `Outcome`, which has not changed anything yet. So whoever runs it decides in which thread each part is
done: in training, the encoding is the caller's, the exchanges are the wire's, and the outcome is applied by the caller
again.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...compressors import CompressedTensor, Compressor
from ...kernels.layout import Layout
from ...kernels.updates import Update
from ..handle import Report
from ..transport.link import Buffers as Messages
from ..transport.link import Seen
from ..transport.operation import Operation


class Exchange(NamedTuple):
    """What an algorithm asks for: to send these bytes and receive those, by rank of the operation's group."""

    operation: Operation
    sends: Messages
    receives: Messages


class Outcome(NamedTuple):
    """The state after the last exchange: nothing has been changed yet."""

    finite: bool
    """Whether every rank's input, and every sum that an owner sent on, is finite; the same on all ranks."""
    keep: Callable[[Tensor | None, Update | None], None]
    """(gradient, update): update the residuals, and the moments by the gradient, if there is an update."""
    write: Callable[[Tensor], None]
    """Write the result, weighted, into a flat tensor."""
    settle: Callable[[Tensor, Update | None, Tensor], None] | None = None
    """(gradient, update, out): `keep` and `write` in one pass over the memory, where a kernel can."""

    def apply(self, gradient: Tensor | None, update: Update | None, out: Tensor) -> None:
        """Update the residuals and the moments, and write the result into `out`, which may be the gradient itself.

        gradient   what was encoded; or, with an update, what the update was made of. None: there is no residual.
        """
        if self.settle is not None and gradient is not None:
            self.settle(gradient, update, out)
        else:
            self.keep(gradient, update)
            self.write(out)


Run = Generator[Exchange, Seen, Outcome]
"""An algorithm at work."""


class Buffers:
    """Memory for payloads. One that is used for every step gives each of them the same memory again.

    On a GPU encoding may be replayed from a recording (`recording.py`): then what it made when it was recorded is what
    it has made now.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._made: list[CompressedTensor] = []
        self._parts: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}
        self._next = self._next_made = 0
        self.is_replayed = False
        """Whether what is encoded now has been, by a recording."""

    def rewind(self, *, is_replayed: bool = False) -> None:
        """The next call of `take` is the first one of a step."""
        self._next = self._next_made = 0
        self.is_replayed = is_replayed
        if not is_replayed:
            self._made = []

    def take(self, shape: tuple[int, ...], device: torch.device, *, pinned: bool = False) -> Tensor:
        if self._next == len(self._kept):
            self._kept.append(_empty(shape, device, pinned))
        elif self._kept[self._next].shape != shape:
            self._kept[self._next] = _empty(shape, device, pinned)
        self._next += 1
        return self._kept[self._next - 1]

    def parts_of(self, taken: Tensor, cut: Callable[[Tensor], Sequence[Tensor]] = list) -> Sequence[Tensor]:
        """Return the parts of what was taken last, by default its rows: views, which are made once."""
        known = self._parts.get(self._next)
        if known is None or known[0] is not taken:
            known = self._parts[self._next] = taken, cut(taken)
        return known[1]

    def encoded(self, encode: Callable[[], CompressedTensor]) -> CompressedTensor:
        """Encode, or return what a recording has encoded."""
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
    tensor: Tensor
    """Read by `encode` alone: in training, other tensors use its memory after that."""
    residual: Tensor | None
    first: Compressor
    second: Compressor
    owner_residual: Tensor | None
    """What this rank, as an owner, has not sent on so far: of its share, in units of the sum."""
    key: int | None
    weight: float
    report: Report
    buffers: Buffers = field(default_factory=Buffers)
    through_host: bool = False
    """Whether payloads of a GPU are sent from, and received in, pinned memory that is kept from step to step."""

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
        """The payload, counted in the compressor's statistics; the residual is only read."""
        with self.clock("encode"):
            made = self.buffers.encoded(lambda: compressor.encode(tensor, residual, key=key, out=out, counted=True))
        if self.buffers.is_replayed:
            compressor.stats.add(tensor.nbytes, made.nbytes, 0.0, True, made.kernels)
        return made

    def on_host(self, payloads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return where payloads are sent from and received in; this rank's is there once the GPU has come so far."""
        if not self.through_host:
            return payloads
        host = self.buffers.parts_of(
            self.buffers.take((self.size, payloads[0].numel()), self.tensor.device, pinned=True)
        )
        if not self.buffers.is_replayed:
            host[self.rank].copy_(payloads[self.rank], non_blocking=True)
        return host

    def keep(
        self, ct: CompressedTensor, gradient: Tensor | None, residual: Tensor | None, update: Update | None
    ) -> None:
        """The second half of `encode`: the residual, and the moments of an update; all ranks were finite."""
        if update is not None and gradient is not None:
            with self.clock("update"):
                update.advance(gradient, residual)
            if residual is not None:
                with self.clock("encode"):
                    ct.compressor.accumulate(ct, residual, -1.0)
        elif residual is not None and gradient is not None:
            with self.clock("encode"):
                ct.compressor.commit(ct, gradient, residual, finite=True)

    def exchange(self, sends: Messages, receives: Messages) -> Exchange:
        return Exchange(self.operation, sends, receives)

    def all_gather(self, parts: Sequence[Tensor]) -> Generator[Exchange, Seen, list[Tensor]]:
        return all_gather(self.operation, parts)

    def clock(self, phase: str) -> AbstractContextManager[None]:
        return self.report.clock(phase)

    def judge(self, payloads: Sequence[Tensor], layouts: Sequence[Layout]) -> bool:
        """Tell whether every rank's input was finite, from the payloads that came from each; all ranks have all."""
        self.check(payloads, layouts)
        return self.has_no_mark(payloads, layouts)

    def has_no_mark(self, payloads: Sequence[Tensor], layouts: Sequence[Layout]) -> bool:
        """Tell whether no payload is that of an input that was not finite."""
        return self.operation.once(lambda: _no_mark(payloads, layouts))

    def check(self, payloads: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
        """Raise an error that names the rank whose payload no compressor could have made: nothing has changed so far.

        Ranks that are threads of this process need no judge; on a GPU, this rank's own payload needs none either.
        """
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
        """The same for sums of owners that are not compressed: NaN throughout or nowhere, but one may be infinite."""
        if self.operation.channel.group is None:
            return
        for rank, part in enumerate(sums):
            if bool(part.sum().isnan()) and 0 < int(part.isnan().sum()) < part.numel():  # one look is enough mostly
                raise self.operation.malformed(rank, "some values are marked as not finite and others are not")

    def buffer(self, *shape: int) -> Tensor:
        return self.buffers.take(shape, self.tensor.device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """As torch's, in memory of `buffers`: what is applied on another stream must not be freed on this one."""
        return self.buffer(numel * dtype.itemsize).view(dtype)


def all_gather(operation: Operation, parts: Sequence[Tensor]) -> Generator[Exchange, Seen, list[Tensor]]:
    """Fill everybody's part; this rank's is there. All of them, where they can be read soonest."""
    others, own = operation.channel.others, parts[operation.channel.rank]
    sent, received = yield Exchange(operation, dict.fromkeys(others, own), {rank: parts[rank] for rank in others})
    return [
        next(iter(sent.values()), own) if part is own else received.get(rank, part) for rank, part in enumerate(parts)
    ]


def _no_mark(payloads: Sequence[Tensor], layouts: Sequence[Layout]) -> bool:
    """Whether none of the payloads is that of an input that was not finite: each begins with a float, or with NaN."""
    if all(payload.device.type == "cpu" for payload in payloads):
        return not any(
            _is_nan(payload.numpy()[: layout.leading_float.itemsize], layout.leading_float)
            for payload, layout in zip(payloads, layouts, strict=True)
            if layout.numel
        )
    leading = [
        payload[: layout.leading_float.itemsize].clone().view(layout.leading_float).float()
        for payload, layout in zip(payloads, layouts, strict=True)
        if layout.numel
    ]
    return not leading or not bool(torch.cat(leading).isnan().any())


_NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


def _is_nan(data: "np.ndarray[Any, np.dtype[np.uint8]]", dtype: torch.dtype) -> bool:
    """Of the bytes of one float. torch would take ten times as long, and this is asked for every payload."""
    if dtype == torch.bfloat16:  # which numpy does not have
        return (int(data[0]) | int(data[1]) << 8) & 0x7FFF > 0x7F80
    return bool(np.isnan(data.view(_NUMPY[dtype])[0]))
