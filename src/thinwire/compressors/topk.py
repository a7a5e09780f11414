"""Top-k: the entries that matter most, by magnitude (Aji and Heafield 2017, Stich et al. 2018)."""

from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from math import ceil

import torch

from ..kernels.layout import TopKLayout, topk_record
from .base import Compressor
from .spec import Ratio, check_choice, parse_ratio, register_compressor

BITS = (1, 2, 4, 8, 16, 32)
BITS_OF_A_SUM = {1: 4, 2: 4, 4: 8, 8: 16, 16: 32, 32: 32}
DENSER = 8
"""A sum is sent on with up to this many times the elements: 512 of 4,096 after 64 of 4,096 cost no loss in training."""
UNION = Fraction(1, 48)
"""Of all elements, that the ranks of a training send together by default; a sum is sent on with as many."""
CHUNKS = tuple(1 << exponent for exponent in range(4, 17))


@register_compressor("topk")
@dataclass(frozen=True)
class TopK(Compressor):
    """The `ratio` largest of every `chunk` entries, with values of `bits` bits.

    ratio  share to keep: 0.01, "1%" or "1/64"; of n entries the next whole number up is kept, so never none.
    bits   1, 2, 4, 8, 16 or 32 for each value; below 32 with scales per chunk, and the error goes to the residual.
    chunk  a power of two from 16 to 65,536; None for the exact top-k of the whole tensor.

    Ties go to the lowest position. Positions cost about 8 bits each at 1/64 (Elias-Fano).

    >>> import torch, thinwire
    >>> c = thinwire.TopK(ratio="1/64", bits=2)
    >>> 4 * 25_000_000 / c.nbytes(25_000_000) > 195
    True
    >>> residual = torch.zeros(5)
    >>> thinwire.TopK(ratio="1/5").compress(torch.tensor([1., -5., 2., 0., 4.]), residual).decompress()
    tensor([ 0., -5.,  0.,  0.,  0.])
    >>> residual
    tensor([1., 0., 2., 0., 4.])
    """

    ratio: Ratio
    _: KW_ONLY
    bits: int = 32
    chunk: int | None = 4096

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", parse_ratio(self.ratio))
        check_choice("bits", self.bits, BITS)
        if self.chunk is not None:
            check_choice("chunk", self.chunk, CHUNKS, "none")

    @property
    def sparse(self) -> bool:
        return True

    def kept(self, entries: int) -> int:
        """How many of a chunk of `entries` are sent."""
        return ceil(entries * Fraction(self.ratio))

    def for_sum(self, ranks: int) -> "TopK":
        """All that any of up to 8 ranks sent; of more ranks 8 times as many elements, or `UNION`; and more bits."""
        ratio = Fraction(self.ratio)
        kept = min(Fraction(1), ranks * ratio, max(DENSER * ratio, UNION))
        return replace(self, ratio=kept, bits=BITS_OF_A_SUM[self.bits])

    def _layout(self, numel: int, dtype: torch.dtype) -> TopKLayout:
        chunk = self.chunk or numel
        rows, rest = divmod(numel, chunk)
        record = topk_record(chunk, self.kept(chunk), self.bits)
        tail = topk_record(rest, self.kept(rest), self.bits) if rest else None
        return TopKLayout(numel, dtype, rows, record, tail)
