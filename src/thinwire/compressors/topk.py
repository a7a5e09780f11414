"""Top-k: sends the elements of largest magnitude (Aji and Heafield 2017, Stich et al. 2018)."""

from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from math import ceil

import torch

from ..kernels.layout import TopKLayout, topk_record
from .base import Compressor
from .spec import Ratio, check_choice, parse_ratio, register_compressor

BITS = (1, 2, 4, 8, 16, 32)
BITS_OF_A_SUM = {1: 4, 2: 4, 4: 8, 8: 16, 16: 32, 32: 32}
DENSER = 8  # A sum keeps up to this many times the elements of one rank: 512 of 4,096 after 64 did no harm in training
UNION = Fraction(1, 48)  # Share of all elements that all ranks together send by default. A sum may always be this dense
CHUNKS = (*(1 << exponent for exponent in range(4, 17)), None)


@register_compressor("topk")
@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the `ratio` largest of every `chunk` elements by magnitude, with values of `bits` bits.

    ratio  share to keep: 0.01, "1%" or "1/64". The number of elements is rounded up, so at least one is kept.
    bits   1, 2, 4, 8, 16 or 32 bits for each value. Below 32, each chunk has scales, and the residual takes the error.
    chunk  a power of two from 16 to 65,536, or None for the exact top-k of the whole tensor.

    Of equal magnitudes the lowest position is kept. A position costs about 8 bits at ratio 1/64 (Elias-Fano).

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
    sparse = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", parse_ratio(self.ratio))
        check_choice("bits", self.bits, BITS)
        check_choice("chunk", self.chunk, CHUNKS)

    def kept(self, elements: int) -> int:
        """Return how many elements are sent of a chunk of `elements` elements."""
        return ceil(elements * Fraction(self.ratio))

    def for_sum(self, ranks: int) -> "TopK":
        """Return the compressor for a sum over `ranks` ranks, with more elements and more bits (at most 32).

        It keeps as many elements as all ranks sent, but at most `DENSER` times those of one rank, or `UNION` if that is
        larger.
        """
        ratio = Fraction(self.ratio)
        kept = min(Fraction(1), ranks * ratio, max(DENSER * ratio, UNION))
        return replace(self, ratio=kept, bits=BITS_OF_A_SUM[self.bits])

    def _layout(self, numel: int, dtype: torch.dtype) -> TopKLayout:
        chunk = self.chunk or numel
        rows, rest = divmod(numel, chunk)
        record = topk_record(chunk, self.kept(chunk), self.bits)
        tail = topk_record(rest, self.kept(rest), self.bits) if rest else None
        return TopKLayout(numel, dtype, rows=rows, record=record, tail=tail)
