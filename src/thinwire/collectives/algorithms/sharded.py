"""The algorithm sharded: each rank owns a share of the elements, sums it, and sends the sum to all ranks.

It is a compressed reduce-scatter, then a compressed all-gather (cost.py has the bytes). The owner keeps the error of
the second compression, in a residual with the numel of its share (Tang et al. 2019, DoubleSqueeze). Shares consist of
whole records, so the piece for an owner is a slice of the payload. Sums are float32 (float64), in the order of ranks.

Without compression in both stages, this is the algorithm dense; of values that all ranks drew alike (RandomK), values.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...compressors import NoCompression
from ...kernels.layout import DenseLayout, Layout, residual_dtype
from ...kernels.reference.dense import read_values
from ..cost import DENSE, Span, dtype_of_sum, is_whole, owned
from ..transport.link import Seen
from .leg import Exchange, Landing, Leg, Story, exchange_parts, is_unmarked, land, until_known


def sharded(leg: Leg) -> Story:
    """Run a compressed reduce-scatter, then a compressed all-gather."""
    cut = owned(leg.first, numel=leg.tensor.numel(), dtype=leg.tensor.dtype, ranks=leg.size)
    total = yield from reduce_scatter(leg, cut)
    finite, write = yield from all_gather(leg, cut, total)
    landing = yield finite
    leg.commit(landing)
    write(landing.out)


def reduce_scatter(leg: Leg, cut: Sequence[Span]) -> Generator[Exchange, Seen, Tensor]:
    """Return the sum of this rank's share, in float32 or float64."""
    first, dtype, layout = leg.first, leg.tensor.dtype, leg.layout
    payload = leg.buffer(layout.nbytes)
    sent = leg.encode(first, leg.tensor, leg.residual, out=payload)
    pieces = leg.memory.parts_of(
        payload, lambda whole: whole.split([first.nbytes(stop - start, dtype) for start, stop in cut])
    )
    received = leg.buffer(leg.size, pieces[leg.rank].numel())
    rows = leg.memory.parts_of(received)
    rows[leg.rank].copy_(pieces[leg.rank])
    sends, receives = ({rank: each[rank] for rank in leg.operation.channel.others} for each in (pieces, rows))
    seen = yield Exchange(leg.operation, sends, receives)

    start, stop = cut[leg.rank]
    share = first.layout(stop - start, dtype)
    leg.check([seen.received.get(rank, row) for rank, row in enumerate(rows)], [share] * leg.size)
    total = leg.empty(stop - start, residual_dtype(dtype))
    with leg.report.clock("decode"):
        piece = replace(sent, numel=stop - start, payload=rows[leg.rank])
        first.decompress(piece, total, payloads=received)
    return total


def all_gather(
    leg: Leg, cut: Sequence[Span], total: Tensor
) -> Generator[Exchange, Seen, tuple[bool, Callable[[Tensor], None]]]:
    """Compress the sum of this rank's share with the owner's residual, and send it to all ranks.

    Return whether all sums are finite, and a function that writes them, weighted, into a flat tensor.
    """
    second = leg.second
    if isinstance(second, NoCompression) and leg.owner_residual is None:
        return (yield from _all_gather_dense(leg, cut, total))
    total = total.to(dtype_of_sum(second, leg.tensor.dtype))
    layouts = [second.layout(stop - start, total.dtype) for start, stop in cut]
    everything = leg.buffer(sum(layout.nbytes for layout in layouts))
    sums = leg.memory.parts_of(everything, lambda whole: whole.split([layout.nbytes for layout in layouts]))
    own = leg.encode(second, total, leg.owner_residual, out=sums[leg.rank])
    seen = yield from exchange_parts(leg.operation, sums)

    def write(out: Tensor) -> None:
        pieces = list(zip(cut, sums, strict=True))
        if is_whole(second, numel=out.numel(), dtype=total.dtype, cut=cut):
            pieces = [((0, out.numel()), everything)]  # decoded by one kernel
        with leg.report.clock("decode"):
            for (start, stop), payload in pieces:
                part = replace(own, numel=stop - start, payload=payload)
                second.decompress(part, out[start:stop], leg.weight)

    return leg.check_finite(seen, layouts), write


def _all_gather_dense(
    leg: Leg, cut: Sequence[Span], total: Tensor
) -> Generator[Exchange, Seen, tuple[bool, Callable[[Tensor], None]]]:
    """Send the sum of this rank's share to all ranks, weighted first, so that a 16-bit average does not overflow."""
    dtype, width = leg.tensor.dtype, leg.tensor.itemsize
    everything = leg.buffer(cut[-1][1] * width)
    sums = leg.memory.parts_of(everything, lambda each: each.split([(stop - start) * width for start, stop in cut]))
    sums[leg.rank].copy_(total.mul_(leg.weight).to(dtype).view(torch.uint8))
    seen = yield from exchange_parts(leg.operation, sums)
    layouts: list[Layout] = [DenseLayout(stop - start, dtype) for start, stop in cut]
    leg.check_sums([part.view(dtype) for part in seen])

    def write(out: Tensor) -> None:
        with leg.report.clock("decode"):
            out.copy_(everything.view(dtype))

    return is_unmarked(seen, layouts), write


def values(leg: Leg) -> Story:
    """Encode the tensor, and sum the values of all payloads by a dense all-reduce."""
    layout = leg.layout
    payload = leg.buffer(layout.nbytes)
    sent = leg.encode(leg.first, leg.tensor, leg.residual, out=payload)
    kept = read_values(sent.payload, layout.dtype)
    dense = sharded(
        replace(leg, tensor=kept, residual=None, first=DENSE, second=DENSE, owner_residual=None, weight=1.0)
    )
    finite = yield from until_known(dense)
    landing = yield finite
    leg.commit(landing)
    summed = torch.empty_like(kept)
    land(dense, Landing(summed))
    with leg.report.clock("decode"):
        leg.first.decompress(replace(sent, payload=summed.view(torch.uint8)), landing.out, leg.weight)
