"""The algorithm sharded: each rank owns a share of the elements, sums it, and sends the sum to all ranks.

It is a compressed reduce-scatter, then a compressed all-gather (cost.py has the bytes). The owner keeps the error of
the second compression, in a residual with the numel of its share (Tang et al. 2019, DoubleSqueeze). Shares consist of
whole records, so the piece for an owner is a slice of the payload. Sums are float32 (float64), in the order of ranks.

Without compression in both stages, this is the algorithm dense; of values that all ranks drew alike (RandomK), values.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...compressors import CompressedTensor, NoCompression
from ...kernels.joined import Flat
from ...kernels.layout import DenseLayout, Layout, residual_dtype
from ...kernels.reference.dense import read_values
from ...kernels.updates import Update
from ..cost import DENSE, Span, dtype_of_sum, is_whole, owned
from ..transport.link import Seen
from .stage import Exchange, Exchanges, Outcome, Stage, exchange_parts, is_unmarked


def sharded(stage: Stage) -> Exchanges:
    """Run a compressed reduce-scatter, then a compressed all-gather."""
    cut = owned(stage.first, numel=stage.tensor.numel(), dtype=stage.tensor.dtype, ranks=stage.size)
    total, sent = yield from reduce_scatter(stage, cut)
    second = yield from all_gather(stage, cut, total)

    def commit(gradient: Flat | None, update: Update | None) -> None:
        stage.commit(sent, gradient, residual=stage.residual, update=update)
        second.commit(None, None)

    return Outcome(second.finite, commit, second.write)


def reduce_scatter(stage: Stage, cut: Sequence[Span]) -> Generator[Exchange, Seen, tuple[Tensor, CompressedTensor]]:
    """Return the sum of this rank's share, in float32 or float64, and the payload that this rank encoded."""
    first, dtype, layout = stage.first, stage.tensor.dtype, stage.layout
    payload = stage.buffer(layout.nbytes)
    sent = stage.encode(first, stage.tensor, residual=stage.residual, out=payload, key=stage.key)
    pieces = stage.buffers.parts_of(
        payload, lambda whole: whole.split([first.nbytes(stop - start, dtype) for start, stop in cut])
    )
    received = stage.buffer(stage.size, pieces[stage.rank].numel())
    rows = stage.buffers.parts_of(received)
    rows[stage.rank].copy_(pieces[stage.rank])
    sends, receives = ({rank: each[rank] for rank in stage.others} for each in (pieces, rows))
    seen = yield Exchange(stage.operation, sends, receives)

    start, stop = cut[stage.rank]
    share = first.layout(stop - start, dtype)
    stage.check([seen.received.get(rank, row) for rank, row in enumerate(rows)], [share] * stage.size)
    total = stage.empty(stop - start, residual_dtype(dtype))
    with stage.report.clock("decode"):
        piece = replace(sent, numel=stop - start, payload=rows[stage.rank])
        first.decompress(piece, total, payloads=received)
    return total, sent


def all_gather(stage: Stage, cut: Sequence[Span], total: Tensor) -> Exchanges:
    """Compress the sum of this rank's share with the owner's residual, and send it to all ranks."""
    second = stage.second
    if isinstance(second, NoCompression) and stage.owner_residual is None:
        return (yield from _all_gather_dense(stage, cut, total))
    total = total.to(dtype_of_sum(second, stage.tensor.dtype))
    layouts = [second.layout(stop - start, total.dtype) for start, stop in cut]
    everything = stage.buffer(sum(layout.nbytes for layout in layouts))
    sums = stage.buffers.parts_of(everything, lambda whole: whole.split([layout.nbytes for layout in layouts]))
    own = stage.encode(second, total, residual=stage.owner_residual, out=sums[stage.rank], key=stage.key)
    seen = yield from exchange_parts(stage.operation, sums)

    def commit(gradient: Flat | None, update: Update | None) -> None:
        stage.commit(own, total, residual=stage.owner_residual, update=None)

    def write(out: Tensor) -> None:
        pieces = list(zip(cut, sums, strict=True))
        if is_whole(second, numel=out.numel(), dtype=total.dtype, cut=cut):
            pieces = [((0, out.numel()), everything)]  # decoded by one kernel
        with stage.report.clock("decode"):
            for (start, stop), payload in pieces:
                part = replace(own, numel=stop - start, payload=payload)
                second.decompress(part, out[start:stop], stage.weight)

    return Outcome(stage.check_finite(seen, layouts), commit, write)


def _all_gather_dense(stage: Stage, cut: Sequence[Span], total: Tensor) -> Exchanges:
    """Send the sum of this rank's share to all ranks, weighted first, so that a 16-bit average does not overflow."""
    dtype, width = stage.tensor.dtype, stage.tensor.itemsize
    everything = stage.buffer(cut[-1][1] * width)
    sums = stage.buffers.parts_of(everything, lambda each: each.split([(stop - start) * width for start, stop in cut]))
    sums[stage.rank].copy_(total.mul_(stage.weight).to(dtype).view(torch.uint8))
    seen = yield from exchange_parts(stage.operation, sums)
    layouts: list[Layout] = [DenseLayout(stop - start, dtype) for start, stop in cut]
    stage.check_sums([part.view(dtype) for part in seen])
    finite = is_unmarked(seen, layouts)

    def write(out: Tensor) -> None:
        with stage.report.clock("decode"):
            out.copy_(everything.view(dtype))

    return Outcome(finite, lambda gradient, update: None, write)


def values(stage: Stage) -> Exchanges:
    """Encode the tensor, and sum the values of all payloads by a dense all-reduce."""
    layout = stage.layout
    payload = stage.buffer(layout.nbytes)
    sent = stage.encode(stage.first, stage.tensor, residual=stage.residual, out=payload, key=stage.key)
    kept = read_values(sent.payload, layout.dtype)
    outcome = yield from sharded(
        replace(stage, tensor=kept, residual=None, first=DENSE, second=DENSE, owner_residual=None, weight=1.0)
    )

    def commit(gradient: Flat | None, update: Update | None) -> None:
        stage.commit(sent, gradient, residual=stage.residual, update=update)

    def write(out: Tensor) -> None:
        summed = torch.empty_like(kept)
        outcome.write(summed)
        with stage.report.clock("decode"):
            stage.first.decompress(replace(sent, payload=summed.view(torch.uint8)), out, stage.weight)

    return Outcome(outcome.finite, commit, write)
