"""What the algorithms have in common: a part of a tensor to reduce over one group, and what came of it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..compressors import Compressor
from ..compressors.pending import Pending
from ..kernels.layout import Layout
from ..kernels.updates import Update
from .handle import Report
from .operation import Operation

COMPUTE = threading.Lock()
"""Compressing is done by one operation at a time: it takes all cores anyway, and the first one's bytes leave sooner."""


class Outcome(NamedTuple):
    """The state after the exchange: nothing has been changed yet."""

    finite: bool
    """Whether every rank's input, and every sum that an owner sent on, is finite; the same on all ranks."""
    settle: Callable[[bool], None]
    """Update the residuals if it counts, else leave them as they were. Before `write`: it needs the tensor."""
    write: Callable[[Tensor], None]
    """Write the result, weighted, into a flat tensor."""


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
    begun: list[Pending]
    """What has been compressed and not settled: if the operation fails, it did not count."""
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
    ) -> Pending:
        """The payload, counted in the compressor's statistics."""
        with self.compute("encode"):
            pending = compressor.begin(tensor, residual, key=key, out=out, update=update)
        if residual is not None:
            self.begun.append(pending)
        return pending

    def settle(self, pending: Pending, counts: bool) -> None:
        """The second half of `encode`."""
        with self.compute("encode"):
            pending.settle(counts)
        if pending in self.begun:
            self.begun.remove(pending)

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        with self.report.clock("exchange"):
            self.operation.exchange(sends, receives)

    def all_gather(self, parts: list[Tensor]) -> list[Tensor]:
        """Fill everybody's part; this rank's is there. All of them, where they can be read soonest."""
        with self.report.clock("exchange"):
            return self.operation.all_gather(parts)

    @contextmanager
    def compute(self, phase: str) -> Iterator[None]:
        with COMPUTE, self.report.clock(phase):
            yield

    def buffer(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.tensor.device)


def no_mark(payloads: list[Tensor], layouts: list[Layout]) -> bool:
    """Whether none of the payloads is that of an input that was not finite: each begins with a float, or with NaN."""
    leading = [
        payload[: layout.leading_float.itemsize].clone().view(layout.leading_float).float()
        for payload, layout in zip(payloads, layouts, strict=True)
        if layout.numel
    ]
    return not leading or not bool(torch.cat(leading).isnan().any())
