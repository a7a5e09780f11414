"""gather: every rank's payload to every rank, decoded in the order of ranks.

Exact in the sense that the sum is that of the decoded payloads and nothing else. The bytes grow with the world, so it
wins in small ones: (P - 1) payloads sent by each of P ranks.

A large tensor on a CPU is encoded in pieces of whole records, and a piece is on its way while the next is encoded.
"""

from math import ceil

import torch
from torch import Tensor

from ..compressors import CompressedTensor, Compressor
from ..kernels.updates import Update
from .cost import Span, owned
from .stage import Outcome, Stage, no_mark

PIECE = 1 << 21
"""Entries of which the encoding takes longer than to set their exchange going."""


def pieces(first: Compressor, numel: int, dtype: torch.dtype, device: torch.device) -> list[Span]:
    """What is encoded and sent at a time; the same bytes as all at once. A GPU is quicker with everything at once."""
    if device.type != "cpu" or first.draws or numel <= PIECE:
        return [(0, numel)]
    return [span for span in owned(first, numel, dtype, ceil(numel / PIECE)) if span[0] < span[1]]


def gather(stage: Stage) -> Outcome:
    first, tensor, residual, update = stage.first, stage.tensor, stage.residual, stage.update
    cut = pieces(first, tensor.numel(), tensor.dtype, tensor.device)
    layouts = [first.layout(stop - start, tensor.dtype) for start, stop in cut]
    payloads = stage.buffer(stage.size, stage.layout.nbytes)
    columns = payloads.split([layout.nbytes for layout in layouts], dim=1)
    under_way = []
    for (start, stop), column in zip(cut, columns, strict=True):
        sent = stage.encode(
            first, tensor[start:stop], None if residual is None else residual[start:stop], column[stage.rank],
            stage.key, None if update is None else update.part(start, stop),
        )  # fmt: skip
        under_way.append(stage.begin_all_gather(list(column)))
    with stage.report.clock("exchange"):
        seen = [finish() for finish in under_way]
    own = CompressedTensor(first, tensor.numel(), tensor.dtype, sent.key, payloads[stage.rank], sent.kernels)

    def commit() -> None:
        stage.commit(own, tensor, residual)

    def write(out: Tensor) -> None:
        with stage.compute("decode"):
            first.decompress(own, out, stage.weight, payloads=payloads)

    def settle(update: Update | None) -> None:
        with stage.compute("decode"):
            first.settle(own, tensor, residual, payloads, stage.rank, stage.weight, update)

    finite = all(no_mark(parts, [layout] * stage.size) for parts, layout in zip(seen, layouts, strict=True))
    return Outcome(finite, commit, write, settle)
