"""Compares each result with the reference kernels before its row is reported.

positions   equal, bit for bit
values      equal bits if values are sent unrounded; otherwise each element is within one unit in the last place of the
            bfloat16 scales, or as far from the input as the reference is, which is a tie between two levels
decoding    equal bits to the reference's decoding of the same payload
residual    sent + kept = input: exactly for float32 sent as float32, else up to the rounding of two additions
"""

from dataclasses import replace

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors import CompressedTensor, Compressor
from thinwire.kernels.layout import DenseLayout, Layout, RandomKLayout, TopKLayout

SCALE_ULP = 2.0**-7
"""Largest relative size of one unit in the last place of a bfloat16."""
WEIGHT = 0.5
_LIMIT = 1 << 22


class Mismatch(Exception):
    """The result of a compressor differs from that of the reference kernels."""


def check(compressor: Compressor, gradient: Tensor, residual: Tensor, key: int) -> CompressedTensor:
    """Compress once and compare the result with the reference, without changing the residual.

    Raises `Mismatch` with a description of the first difference.
    """
    kept = residual.clone()
    ct = compressor.compress(gradient, kept, key=key)
    sent = compressor.decompress(ct, torch.empty_like(residual))
    total = compressor.accumulate(ct, gradient.clone(), WEIGHT)
    with kernels.force("reference"):
        name, kernel = kernels.select(ct.layout, gradient.device)
        reference = replace(ct, payload=torch.empty_like(ct.payload), kernels=name)
        kernel.encode(gradient, residual, ct.layout, ct.key, reference.payload)
        read = compressor.decompress(ct, torch.empty_like(residual))
        same = torch.equal(ct.payload, reference.payload)
        sent_reference = read if same else compressor.decompress(reference, torch.empty_like(residual))
        total_reference = compressor.accumulate(ct, gradient.clone(), WEIGHT)
    came_in = gradient.to(residual.dtype).add_(residual)

    if not ct.finite:
        raise Mismatch("the payload is marked as not finite, though all that came in is finite")
    if ct.nbytes != compressor.nbytes(gradient.numel(), gradient.dtype):
        raise Mismatch(f"the payload has {ct.nbytes} bytes, announced were {compressor.nbytes(ct.numel, ct.dtype)}")
    _check_positions(ct, reference)
    if _is_exact(ct.layout) and not same:
        _raise_first(sent != sent_reference, "sent", sent, sent_reference)
        raise Mismatch("the payload's bytes differ from the reference's")
    _raise_first(sent != read, "decompressed", sent, read)
    _raise_first(_differs(sent, sent_reference, came_in), "sent", sent, sent_reference)
    rounding = torch.finfo(total.dtype).eps * (total.abs() + total_reference.abs())
    _raise_first(~((total - total_reference).abs() <= rounding), "accumulated", total, total_reference)
    additions = 0 if _is_exact(ct.layout) and gradient.dtype == torch.float32 else 2
    rounding = additions * torch.finfo(kept.dtype).eps * (came_in.abs() + sent.abs())
    _raise_first(~((sent + kept - came_in).abs() <= rounding), "sent + kept", sent + kept, came_in)
    return ct


def _is_exact(layout: Layout) -> bool:
    """Return whether values are sent as floats, so that no rounding can differ."""
    return isinstance(layout, DenseLayout | RandomKLayout) or (
        isinstance(layout, TopKLayout) and layout.record.bits == 32
    )


def _check_positions(ct: CompressedTensor, reference: CompressedTensor) -> None:
    if not isinstance(ct.layout, TopKLayout):
        return
    for record, part in ct.layout.parts(_LIMIT):
        given, expected = (
            payload[part.nbytes].view(part.rows, -1)[:, record.low_at :] for payload in (ct.payload, reference.payload)
        )
        wrong = (given != expected).any(1)
        if bool(wrong.any()):
            start = part.entries.start + int(wrong.nonzero()[0]) * record.n
            raise Mismatch(f"other positions than the reference's in elements {start} to {start + record.n - 1}")


def _differs(sent: Tensor, reference: Tensor, came_in: Tensor) -> Tensor:
    allowed = SCALE_ULP * torch.maximum(sent.abs(), reference.abs())
    tie = ((came_in - sent).abs() - (came_in - reference).abs()).abs() <= 2 * allowed
    return ~(((sent - reference).abs() <= allowed) | tie)


def _raise_first(wrong: Tensor, what: str, given: Tensor, expected: Tensor) -> None:
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise Mismatch(
            f"{what} {given[at].item():.9g} at element {at}, expected {expected[at].item():.9g} "
            f"({int(wrong.sum())} of {wrong.numel()} elements differ)"
        )
