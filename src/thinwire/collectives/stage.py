"""What the algorithms have in common: a part of a tensor to reduce over one group, and what came of it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..compressors import CompressedTensor, Compressor
from ..kernels.layout import Layout
from ..kernels.updates import Update
from .handle import Report
from .operation import Operation

_COMPUTE = threading.Lock()
SMALL = 1 << 16


def computing(tensor: Tensor) -> AbstractContextManager[object]:
    """Compressing is done by one operation at a time: it takes all cores anyway, and the first one's bytes leave
    sooner. On a CPU what is small need not wait for what is large, since the link would."""
    return _COMPUTE if tensor.numel() > SMALL or tensor.is_cuda else nullcontext()


class Outcome(NamedTuple):
    """The state after the exchange: nothing has been changed yet."""

    finite: bool
    """Whether every rank's input, and every sum that an owner sent on, is finite; the same on all ranks."""
    commit: Callable[[], None]
    """Update the residuals. Before `write`, since it needs the tensor as it was."""
    write: Callable[[Tensor], None]
    """Write the result, weighted, into a flat tensor."""
    settle: Callable[[Update | None], None] | None = None
    """Commit the update and the residuals, and write the result over the tensor, in one pass; where that is known."""


@dataclass(frozen=True)
class Stage:
    """A flat tensor to be summed over the ranks of one group."""

    operation: Operation
    tensor: Tensor
    residual: Tensor | None
    first: Compressor
    second: Compressor
    owner_residual: Tensor | None
    """What this rank, as an owner, has not sent on so far: of its share, in units of the sum."""
    key: int | None
    weight: float
    report: Report
    update: Update | None = None
    """What an optimizer makes of the tensor before it is compressed."""

    @property
    def rank(self) -> int:
        return self.operation.channel.rank

    @property
    def size(self) -> int:
        return self.operation.channel.size

    @property
    def layout(self) -> Layout:
        return self.first.layout(self.tensor.numel(), self.tensor.dtype)

    def encode(
        self,
        compressor: Compressor,
        tensor: Tensor,
        residual: Tensor | None,
        out: Tensor,
        key: int | None,
        update: Update | None = None,
    ) -> CompressedTensor:
        """The payload, counted in the compressor's statistics; the residual is only read."""
        with self.compute("encode"):
            return compressor.encode(tensor, residual, key=key, out=out, update=update, counted=True)

    def commit(self, ct: CompressedTensor, tensor: Tensor, residual: Tensor | None) -> None:
        """The second half of `encode`, if there is a residual; all ranks were finite."""
        if residual is not None:
            with self.compute("encode"):
                ct.compressor.commit(ct, tensor, residual, finite=True)

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        with self.report.clock("exchange"):
            self.operation.exchange(sends, receives)

    def all_gather(self, parts: list[Tensor]) -> list[Tensor]:
        """Fill everybody's part; this rank's is there. All of them, where they can be read soonest."""
        with self.report.clock("exchange"):
            return self.operation.all_gather(parts)

    @contextmanager
    def compute(self, phase: str) -> Iterator[None]:
        with computing(self.tensor), self.report.clock(phase):
            yield

    def no_mark(self, payloads: list[Tensor], layouts: list[Layout]) -> bool:
        """Tell whether no rank's payload is that of an input that was not finite; all ranks have all of them."""
        return self.operation.once(lambda: _no_mark(payloads, layouts))

    def buffer(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.tensor.device)


def _no_mark(payloads: list[Tensor], layouts: list[Layout]) -> bool:
    """Whether none of the payloads is that of an input that was not finite: each begins with a float, or with NaN."""
    leading = [
        payload[: layout.leading_float.itemsize].clone().view(layout.leading_float).float()
        for payload, layout in zip(payloads, layouts, strict=True)
        if layout.numel
    ]
    return not leading or not bool(torch.cat(leading).isnan().any())
