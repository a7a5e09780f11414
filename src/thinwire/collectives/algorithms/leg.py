"""A leg: what an algorithm tells its story with. A tensor, one group to sum it over, and the memory for its payloads.

An algorithm is a generator, a story. It encodes the tensor and yields the buffers to send and receive, once or twice;
these exchanges are carried out by the wire. Then it yields whether every rank was finite, and has changed nothing so
far. If the reduction lands, the story is given a `Landing`, changes the residual, and writes the sum. If not, it ends.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import kernels
from ...compressors import CompressedTensor, Compressor
from ...kernels.joined import Flat
from ...kernels.layout import Layout
from ...kernels.updates import Update
from ..transport.link import Buffers, Seen
from ..transport.operation import Operation


class Span(NamedTuple):
    """Start and end of one phase, in seconds of `time.perf_counter`."""

    phase: str
    start: float
    stop: float


@dataclass
class Report:
    """The report of one operation on this rank. Its counts are final when the handle is completed."""

    algorithm: str  # gather, sharded, dense or values, with "hierarchical, " in front if there were two stages
    reason: str
    segments: int = 1
    memory: int = 0  # planned bytes, beyond the tensor and the residuals
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_between_nodes: int = 0  # part of `bytes_sent`; with one stage, all of it
    messages: int = 0
    finite: bool = True  # False if the input of any rank was not: the result is NaN, and no residual has changed
    spans: list[Span] = field(default_factory=list)
    """Times of encode, exchange, decode and update; on an accelerator mostly those to launch the kernels."""

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(phase, started, time.perf_counter()))


class Exchange(NamedTuple):
    """The buffers to send and receive in one exchange, by rank in the group of the operation."""

    operation: Operation
    sends: Buffers
    receives: Buffers


class Landing(NamedTuple):
    """What a story is given once every rank is known to be finite."""

    out: Tensor  # flat; the weighted sum is written here
    source: Flat | None = None
    """What was encoded, or with an update the gradient that it was made from. None: only the sum is asked for."""
    update: Update | None = None  # its moments advance now


Story = Generator[Any, Any, None]
"""Yields an `Exchange` and is given what was `Seen`, once or twice; yields a bool and may be given a `Landing`."""


class Encoded(NamedTuple):
    """A payload that was made, of which tensor, and the residual that will keep what it does not hold."""

    ct: CompressedTensor
    tensor: Tensor
    residual: Tensor | None


class Memory:
    """Memory for payloads, the same in every step, and the views of it, which are made once."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._parts: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}
        self._next = 0

    def rewind(self) -> None:
        """Let the next call of `take` return the first buffer again."""
        self._next = 0

    def take(self, shape: tuple[int, ...], device: torch.device, *, pinned: bool = False) -> Tensor:
        if self._next == len(self._kept) or self._kept[self._next].shape != shape:
            place = "cpu" if pinned else device
            self._kept[self._next :] = [torch.empty(shape, dtype=torch.uint8, device=place, pin_memory=pinned)]
        self._next += 1
        return self._kept[self._next - 1]

    def parts_of(self, taken: Tensor, cut: Callable[[Tensor], Sequence[Tensor]] = list) -> Sequence[Tensor]:
        """Return views of the buffer that was taken last, by default its rows."""
        known = self._parts.get(self._next)
        if known is None or known[0] is not taken:
            known = self._parts[self._next] = taken, cut(taken)
        return known[1]


@dataclass
class Leg:
    """A flat tensor on its way over one group. A training step makes the legs of a slice once, and uses them again."""

    first: Compressor
    second: Compressor
    weight: float
    through_host: bool = False
    """Whether payloads on a GPU are sent from, and received in, pinned memory that is kept between steps."""
    memory: Memory = field(default_factory=Memory)
    made: list[Encoded] = field(default_factory=list)
    """All that this leg, and the legs inside it, have encoded; what was encoded first is what the caller gave."""
    known: dict[int, CompressedTensor] = field(default_factory=dict)
    """The same of the flight before, by place: the objects are used again."""

    # Of the flight that uses this leg now.
    operation: Operation = None  # type: ignore[assignment]
    tensor: Tensor = None  # type: ignore[assignment]
    """Only encoding reads it. In training, its memory is reused after that."""
    residual: Tensor | None = None
    owner_residual: Tensor | None = None
    key: int | None = None
    report: Report = None  # type: ignore[assignment]

    @property
    def rank(self) -> int:
        return self.operation.channel.rank

    @property
    def size(self) -> int:
        return self.operation.channel.size

    @property
    def layout(self) -> Layout:
        return self.first.layout(self.tensor.numel(), self.tensor.dtype)

    def release(self) -> None:
        """Keep the memory for the next story, and nothing of this one."""
        self.memory.rewind()
        self.made.clear()
        self.tensor, self.residual, self.owner_residual = None, None, None  # type: ignore[assignment]

    def encode(self, compressor: Compressor, tensor: Tensor, residual: Tensor | None, out: Tensor) -> CompressedTensor:
        """Encode into `out`, and count it in the compressor's statistics. The residual is only read."""
        ct = self.known.get(len(self.made))
        with self.report.clock("encode"):
            if ct is not None and ct.compressor is compressor and ct.payload is out and ct.numel == tensor.numel():
                compressor.encode_again(ct, tensor, residual)
            else:
                ct = compressor.encode(tensor, residual, key=self.key, out=out, counted=True)
        self.made.append(Encoded(ct, tensor, residual))
        if not compressor.draws:
            self.known[len(self.made) - 1] = ct
        return ct

    def on_host(self, payloads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the buffers to send from and receive in: the payloads, or pinned memory with a copy of this rank's."""
        if not self.through_host:
            return payloads
        shape = (self.size, payloads[0].numel())
        host = self.memory.parts_of(self.memory.take(shape, self.tensor.device, pinned=True))
        self.copy_to_host(payloads[self.rank], host[self.rank])
        return host

    def copy_to_host(self, payload: Tensor, host: Tensor) -> None:
        host.copy_(payload, non_blocking=True)

    def fetch(self, payloads: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        """Queue copies of other ranks' payloads to the GPU as they arrive: later, they would delay the optimizer."""
        if host is not payloads:
            others = self.operation.channel.others
            torch._foreach_copy_(
                [payloads[rank] for rank in others], [host[rank] for rank in others], non_blocking=True
            )

    def commit(self, landing: Landing) -> None:
        """Let residuals and moments follow what was encoded; nothing if only the sum is asked for."""
        if landing.source is None:
            return
        for number, (ct, tensor, residual) in enumerate(self.made):
            source: Flat = landing.source if number == 0 else tensor
            if number == 0 and landing.update is not None:
                with self.report.clock("update"):
                    landing.update.advance(source, residual)
                if residual is not None:
                    with self.report.clock("encode"):
                        ct.compressor.accumulate(ct, residual, -1.0)
            elif residual is not None and isinstance(source, Tensor):
                with self.report.clock("encode"):
                    ct.compressor.commit(ct, source, residual, finite=True)

    def apply(self, payloads: Tensor, landing: Landing) -> None:
        """Commit what was encoded, and sum the payloads of all ranks, in one pass over memory if a kernel has one."""
        ct, _, residual = self.made[-1]
        with self.report.clock("decode"):
            if landing.source is None:
                self.first.decompress(ct, landing.out, self.weight, payloads=payloads)
            else:
                self.first.apply(
                    ct, landing.source, residual, payloads=payloads, own=self.rank, weight=self.weight,
                    update=landing.update, out=landing.out,
                )  # fmt: skip

    def check_finite(self, payloads: Sequence[Tensor], layouts: Sequence[Layout]) -> bool:
        self.check(payloads, layouts)
        return is_unmarked(payloads, layouts)

    def check(self, payloads: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
        """Raise an error that names the rank of a malformed payload; trust those of threads, and this GPU's own."""
        if self.operation.channel.backend == "local":
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
        if self.operation.channel.backend == "local":
            return
        for rank, part in enumerate(sums):
            if bool(part.sum().isnan()) and 0 < int(part.isnan().sum()) < part.numel():  # mostly one test is enough
                raise self.operation.malformed(rank, "some values are marked as not finite and others are not")

    def buffer(self, *shape: int) -> Tensor:
        return self.memory.take(shape, self.tensor.device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory that is not freed while a landing uses it on another stream."""
        return self.buffer(numel * dtype.itemsize).view(dtype)


def exchange_parts(operation: Operation, parts: Sequence[Tensor]) -> Generator[Exchange, Seen, list[Tensor]]:
    """Send this rank's part to all ranks. Return the parts of all, or their pinned copies if they were staged."""
    others, own = operation.channel.others, parts[operation.channel.rank]
    sent, received = yield Exchange(operation, dict.fromkeys(others, own), {rank: parts[rank] for rank in others})
    seen = {**dict(enumerate(parts)), **received, operation.channel.rank: next(iter(sent.values()), own)}
    return list(seen.values())


def until_known(story: Story) -> Generator[Exchange, Seen, bool]:
    """Tell a story inside another one, until it is known whether every rank was finite."""
    yielded = next(story)
    while not isinstance(yielded, bool):
        yielded = story.send((yield yielded))
    return yielded


def land(story: Story, landing: Landing) -> None:
    """Tell the end of a story."""
    try:
        story.send(landing)
    except StopIteration:
        return
    raise AssertionError("a story goes on after its landing: a bug in thinwire")


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
