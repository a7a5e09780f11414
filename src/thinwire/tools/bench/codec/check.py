"""Is it right? The comparison with the reference kernels that every row must pass before it is reported.

positions   the same, bit for bit
values      the same bits where they travel unrounded; else, entry for entry, within one unit in the last place of the
            bfloat16 scales, or as far from what came in as the reference is: a tie between two levels
decoding    the same bits as the reference reads from the same payload
residual    sent + kept = came in; exactly for float32 that travels as float32, else to the rounding of two additions
"""

from dataclasses import replace

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors import CompressedTensor, Compressor
from thinwire.kernels.layout import DenseLayout, Layout, RandomKLayout, TopKLayout

SCALE_ULP = 2.0**-7
"""One unit in the last place of a bfloat16, relative to the number, at most."""
WEIGHT = 0.5
_LIMIT = 1 << 22


class Mismatch(Exception):
    """A compressor's result is not what the reference kernels say it must be."""


def check(compressor: Compressor, gradient: Tensor, residual: Tensor, key: int) -> CompressedTensor:
    """Compress once and compare; leaves the residual alone. `Mismatch` says which entry differs, and how."""
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
    """Whether values travel as floats, so that there is nothing to round differently."""
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
            raise Mismatch(f"other positions than the reference's in entries {start} to {start + record.n - 1}")


def _differs(sent: Tensor, reference: Tensor, came_in: Tensor) -> Tensor:
    allowed = SCALE_ULP * torch.maximum(sent.abs(), reference.abs())
    tie = ((came_in - sent).abs() - (came_in - reference).abs()).abs() <= 2 * allowed
    return ~(((sent - reference).abs() <= allowed) | tie)


def _raise_first(wrong: Tensor, what: str, given: Tensor, expected: Tensor) -> None:
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise Mismatch(
            f"{what} {given[at].item():.9g} at entry {at}, expected {expected[at].item():.9g} "
            f"({int(wrong.sum())} of {wrong.numel()} entries differ)"
        )
