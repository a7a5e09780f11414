"""sharded: each rank owns a share; pieces go to their owner, who sums, compresses again, and sends the sum to all.

Reduce-scatter and all-gather, both compressed. Each rank sends (b1 + b2) (P - 1) / P bytes for payloads of b1 and b2
bytes, whatever the world: flat where gather grows. What the second compression leaves behind stays with the owner, in a
residual of the size of its share (Tang et al. 2019, DoubleSqueeze). Shares consist of whole records, so a piece is a
slice of the payload.

With no compression in both stages this is the plain all-reduce, `dense`: sums are made in float32, in the order of
ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..compressors import CompressedTensor, NoCompression
from ..compressors.spec import mix_key
from ..kernels.layout import DenseLayout, Layout, residual_dtype
from .cost import Span, dtype_of_sum, is_whole, owned
from .stage import Outcome, Stage

_SECOND = 2
"""Mixed into the key of the second stage's draws."""


def sharded(stage: Stage) -> Outcome:
    cut = owned(stage.first, stage.tensor.numel(), stage.tensor.dtype, stage.size)
    total, sent = reduce_scatter(stage, cut)
    second = all_gather(stage, cut, total)

    def commit() -> None:
        stage.commit(sent, stage.tensor, stage.residual)
        second.commit()

    return Outcome(second.finite, commit, second.write)


def reduce_scatter(stage: Stage, cut: Sequence[Span]) -> tuple[Tensor, CompressedTensor]:
    """The sum of this rank's share, in float32 or float64, and what this rank sent."""
    first, dtype = stage.first, stage.tensor.dtype
    payload = stage.buffer(stage.layout.nbytes)
    sent = stage.encode(first, stage.tensor, stage.residual, payload, stage.key, stage.update)
    pieces = payload.split([first.nbytes(stop - start, dtype) for start, stop in cut])
    received = stage.buffer(stage.size, pieces[stage.rank].numel())
    received[stage.rank] = pieces[stage.rank]
    others = stage.operation.channel.others
    stage.exchange({rank: pieces[rank] for rank in others}, {rank: received[rank] for rank in others})

    start, stop = cut[stage.rank]
    total = torch.empty(stop - start, dtype=residual_dtype(dtype), device=stage.tensor.device)
    with stage.compute("decode"):
        piece = CompressedTensor(first, stop - start, dtype, sent.key, received[stage.rank], sent.kernels)
        first.decompress(piece, total, payloads=received)
    return total, sent


def all_gather(stage: Stage, cut: Sequence[Span], total: Tensor) -> Outcome:
    """The owner's sum, compressed against its own residual, to all ranks."""
    second = stage.second
    if isinstance(second, NoCompression) and stage.owner_residual is None:
        return _all_gather_dense(stage, cut, total)
    total = total.to(dtype_of_sum(second, stage.tensor.dtype))
    layouts = [second.layout(stop - start, total.dtype) for start, stop in cut]
    everything = stage.buffer(sum(layout.nbytes for layout in layouts))
    sums = list(everything.split([layout.nbytes for layout in layouts]))
    key = mix_key(_SECOND, stage.key) if stage.key is not None else None
    own = stage.encode(second, total, stage.owner_residual, sums[stage.rank], key)
    seen = stage.all_gather(sums)

    def commit() -> None:
        stage.commit(own, total, stage.owner_residual)

    def write(out: Tensor) -> None:
        pieces = list(zip(cut, sums, strict=True))
        if is_whole(second, out.numel(), total.dtype, cut):
            pieces = [((0, out.numel()), everything)]  # decoded by one kernel
        with stage.compute("decode"):
            for (start, stop), payload in pieces:
                part = CompressedTensor(second, stop - start, total.dtype, own.key, payload, own.kernels)
                second.decompress(part, out[start:stop], stage.weight)

    return Outcome(stage.no_mark(seen, layouts), commit, write)


def _all_gather_dense(stage: Stage, cut: Sequence[Span], total: Tensor) -> Outcome:
    """The owner's sum as it is. Weighted before it is rounded: an average of 16-bit numbers does not overflow.

    A sum may, and is then Inf, as in torch's own all-reduce; NaN at the start of a share means that it was marked.
    """
    value = total.mul_(stage.weight).to(stage.tensor.dtype)
    sums = [torch.empty(stop - start, dtype=value.dtype, device=value.device) for start, stop in cut]
    sums[stage.rank] = value
    seen = stage.all_gather([part.view(torch.uint8) for part in sums])
    layouts: list[Layout] = [DenseLayout(part.numel(), part.dtype) for part in sums]

    def write(out: Tensor) -> None:
        with stage.compute("decode"):
            for (start, stop), part in zip(cut, sums, strict=True):
                out[start:stop].copy_(part)

    return Outcome(stage.no_mark(seen, layouts), lambda: None, write)
