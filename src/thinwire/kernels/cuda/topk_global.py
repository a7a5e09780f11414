"""The exact top-k of a whole tensor, or of any record too long for the registers of a block.

The search is narrowed first. A random sample of a million magnitudes gives a bound that a little more than k elements
almost surely reach. One pass over gradient and residual (8 bytes per element) counts, tile by tile, the elements that
reach it. The cumulative sums of these counts are the places where the tiles write their candidates in a second pass. If
fewer than k elements reach the bound, or far more, as when many elements are equal, there are no candidates, and all
later passes read the whole tensor instead. A number on the device, `ok`, selects between the two. So the result is
exact for any sample.

Radix selection follows, 8 bits of the magnitude at a time. Four passes count how often each value of the next 8 bits
occurs among the magnitudes that share the bits found so far. After each pass a single block picks the value of the k-th
largest. Two more passes collect the elements above the threshold, and the first ones equal to it, in the order of
positions. The CPU does not wait for any of these passes.

The k elements are then a small tensor. The reference's own functions quantise and pack it, in torch. They copy a few
constants from the CPU and wait for that, so this path cannot be captured into a CUDA graph.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import TopKRecord
from ..reference import topk as reference
from . import topk_decode
from .launch import launch
from .marks import add_unless
from .numbers import INFINITY_BITS, magnitude_bits, total_at
from .randomk import place_in

_TILE = 4096
_HISTOGRAM_TILE = 1024
_PROGRAMS = 1056
"""Blocks that count digits: eight for each multiprocessor of an H200."""
_SHIFTS = (23, 15, 7, 0)
_DIGITS = (8, 8, 8, 7)
_BITMAP_TILE = 2048
_SAMPLE = 1 << 20
_WORTH_SAMPLING = 16
"""Tensors with fewer elements than this many samples are searched as a whole."""
_SURE = 5.0
"""Safety margin for estimates from the sample, in standard deviations."""


class Source(NamedTuple):
    """The elements to search: `size` candidates if `ok`, else the whole tensor."""

    g: Tensor
    r: Tensor
    values: Tensor
    positions: Tensor
    ok: Tensor
    numel: int
    size: int


def encode(g: Tensor, r: Tensor | None, record: TopKRecord, limit: float, out: Tensor, flag: Tensor) -> None:
    """Write one record. If an element is not finite, the flag is set and the record is invalid."""
    has_r = r is not None
    source = _narrowed(g, g if r is None else r, record.k, flag, has_r)
    state = torch.zeros(2, dtype=torch.int64, device=g.device)  # bits of the threshold so far, how many are wanted
    state[1:].fill_(record.k)
    for shift, digits in zip(_SHIFTS, _DIGITS, strict=True):
        counts = torch.zeros(512, dtype=torch.int64, device=g.device)
        programs = min(_PROGRAMS, triton.cdiv(g.numel(), _HISTOGRAM_TILE))
        launch(count_digits, (programs,), *source, state, counts, SHIFT=shift, DIGITS=digits, HAS_R=has_r,
               TILE=_HISTOGRAM_TILE, num_warps=4)  # fmt: skip
        launch(pick_digit, (1,), counts, state, flag, SHIFT=shift, DIGITS=digits, num_warps=4)
    tiles = triton.cdiv(g.numel(), _TILE)
    above, ties = (torch.zeros(tiles + 1, dtype=torch.int64, device=g.device) for _ in range(2))
    launch(count_chosen, (tiles,), *source, state, above, ties, HAS_R=has_r, TILE=_TILE, num_warps=4)
    positions = torch.zeros(record.k, dtype=torch.int64, device=g.device)
    values = torch.zeros(record.k, dtype=torch.float32, device=g.device)
    launch(
        gather_chosen, (tiles,), *source, state, above.cumsum(0), ties.cumsum(0), positions, values, record.k,
        HAS_R=has_r, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    values = values.masked_fill(flag != 0, 0).clamp(-limit, limit)
    out.copy_(reference.pack_record(positions.unsqueeze(0), values.unsqueeze(0), record).view(-1))


def _narrowed(g: Tensor, r: Tensor, k: int, flag: Tensor, has_r: bool) -> Source:
    """Return the candidates for the k largest. Small tensors are not sampled, and have none."""
    numel, device = g.numel(), g.device
    if numel < _WORTH_SAMPLING * _SAMPLE:
        nowhere = torch.zeros(1, dtype=torch.int64, device=device)
        return Source(g, r, g, nowhere, torch.zeros(1, dtype=torch.int32, device=device), numel, 0)
    rank = k * _SAMPLE / numel
    rank = min(_SAMPLE - 1, int(rank + _SURE * rank**0.5) + 16)
    size = min(numel, int((rank + _SURE * rank**0.5 + 16) / _SAMPLE * numel))
    sample = torch.empty(_SAMPLE, dtype=torch.int32, device=device)
    launch(sample_magnitudes, (triton.cdiv(_SAMPLE, 1024),), g, r, sample, _SAMPLE, *divmod(numel, _SAMPLE),
           HAS_R=has_r, TILE=1024, num_warps=4)  # fmt: skip
    bound = sample.sort(descending=True).values[rank : rank + 1]
    tiles = triton.cdiv(numel, _TILE)
    counts = torch.zeros(tiles + 1, dtype=torch.int64, device=device)
    launch(count_reaching, (tiles,), g, r, bound, counts, flag, numel, HAS_R=has_r, TILE=_TILE, num_warps=4)
    before = counts.cumsum(0)
    ok = ((before[-1:] >= k) & (before[-1:] <= size)).to(torch.int32)
    positions = torch.zeros(size, dtype=torch.int64, device=device)
    values = torch.zeros(size, dtype=torch.float32, device=device)
    launch(gather_reaching, (tiles,), g, r, bound, before, ok, positions, values, numel, HAS_R=has_r, TILE=_TILE,
           num_warps=4)  # fmt: skip
    return Source(g, r, values, positions, ok, numel, size)


def commit(g: Tensor, r: Tensor, record: TopKRecord, out: Tensor, flag: Tensor) -> None:
    """Compute r <- r + g - decoded record, unless the flag is set."""
    launch(add_unless, (triton.cdiv(g.numel(), _TILE),), r, g, flag, g.numel(), TILE=_TILE, num_warps=4)
    _add(out, 0, record, -1.0, r, flag)


def decode(
    payloads: Tensor, offset: int, record: TopKRecord, g: Tensor | None, start: int, weight: float, out: Tensor
) -> None:
    """Compute out <- (0, or out, or out + g) + weight * the records from `offset` on in each payload."""
    if start == topk_decode.ZERO:
        out.zero_()
    elif start == topk_decode.ADD and g is not None:
        out.add_(g)
    rows = out.numel() // record.n
    for row in range(rows):
        for payload in payloads:
            _add(
                payload, offset + row * record.nbytes, record, weight, out[row * record.n : (row + 1) * record.n], None
            )


def _add(payload: Tensor, offset: int, record: TopKRecord, weight: float, out: Tensor, flag: Tensor | None) -> None:
    """Compute out += weight * one record, unless there is a flag and it is set."""
    tiles = triton.cdiv(8 * (record.nbytes - record.high_at), _BITMAP_TILE)
    ranks = torch.zeros(tiles + 1, dtype=torch.int64, device=out.device)
    launch(topk_decode.count_tiles, (tiles,), payload, ranks, offset, record.high_at, record.nbytes,
           TILE=_BITMAP_TILE, num_warps=4)  # fmt: skip
    launch(
        topk_decode.decode_tiles, (tiles,), payload, ranks.cumsum(0), out if flag is None else flag, out, offset,
        record.n, record.k, record.low_bits, record.codes_at, record.low_at, record.high_at, record.nbytes, weight,
        BITS=record.bits, GUARDED=flag is not None, LOW_SPAN=(record.low_bits + 14) // 8, TILE=_BITMAP_TILE,
        num_warps=4,
    )  # fmt: skip


# Kernels ------------------------------------------------------------------------------------------------------------


@triton.jit
def read_source(g_ptr, r_ptr, values_ptr, ok, at, n, HAS_R: tl.constexpr):
    """Return elements of a `Source` of n elements: candidates if `ok`, else g + r."""
    if ok:
        total = tl.load(values_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    else:
        total = total_at(g_ptr, r_ptr, at, n, HAS_R)
    return total


@triton.jit(do_not_specialize=["width", "wider"])
def sample_magnitudes(g_ptr, r_ptr, out_ptr, m, width, wider, HAS_R: tl.constexpr, TILE: tl.constexpr):
    """Write the magnitude bits of one element from each of m strata, drawn at random to avoid patterns."""
    stratum = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at, _ = place_in(stratum, width, wider, stratum * 0)
    tl.store(out_ptr + stratum, magnitude_bits(total_at(g_ptr, r_ptr, at, at + 1, HAS_R)), mask=stratum < m)


@triton.jit
def count_reaching(g_ptr, r_ptr, bound_ptr, counts_ptr, flag_ptr, n, HAS_R: tl.constexpr, TILE: tl.constexpr):
    """Write how many elements of a tile reach the bound to counts[tile + 1]. Set the flag if one is not finite."""
    tile = tl.program_id(0)
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = magnitude_bits(total_at(g_ptr, r_ptr, at, n, HAS_R))
    reached = (bits >= tl.load(bound_ptr)) & (at < n)
    tl.store(counts_ptr + tile + 1, tl.sum(reached.to(tl.int32), axis=0).to(tl.int64))
    if tl.max(bits, axis=0) >= INFINITY_BITS:
        tl.store(flag_ptr, 1)


@triton.jit
def gather_reaching(
    g_ptr, r_ptr, bound_ptr, before_ptr, ok_ptr, positions_ptr, values_ptr, n, HAS_R: tl.constexpr, TILE: tl.constexpr
):
    """Write positions and values of all elements that reach the bound, in order, if `ok`."""
    if tl.load(ok_ptr) != 0:
        tile = tl.program_id(0)
        at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        total = total_at(g_ptr, r_ptr, at, n, HAS_R)
        reached = ((magnitude_bits(total) >= tl.load(bound_ptr)) & (at < n)).to(tl.int32)
        slot = tl.load(before_ptr + tile) + tl.cumsum(reached, axis=0) - reached
        tl.store(positions_ptr + slot, at, mask=reached == 1)
        tl.store(values_ptr + slot, total, mask=reached == 1)


@triton.jit
def count_digits(
    g_ptr, r_ptr, values_ptr, positions_ptr, ok_ptr, numel, size, state_ptr, counts_ptr,
    SHIFT: tl.constexpr, DIGITS: tl.constexpr, HAS_R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count each digit, in bins 0 to 255, among magnitudes with the bits found so far. Bin 256 has all others."""
    ok = tl.load(ok_ptr) != 0
    n = tl.where(ok, size, numel)
    prefix = tl.load(state_ptr).to(tl.int32)
    counts = tl.zeros((512,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * TILE
    while first < n:
        at = first + tl.arange(0, TILE)
        bits = magnitude_bits(read_source(g_ptr, r_ptr, values_ptr, ok, at, n, HAS_R))
        mine = (at < n) & ((bits >> SHIFT >> DIGITS) == (prefix >> SHIFT >> DIGITS))
        counts += tl.histogram(tl.where(mine, (bits >> SHIFT) & ((1 << DIGITS) - 1), 256), 512)
        first += tl.num_programs(0).to(tl.int64) * TILE
    bins = tl.arange(0, 512)
    tl.atomic_add(counts_ptr + bins, counts.to(tl.int64), mask=bins < 256)


@triton.jit
def pick_digit(counts_ptr, state_ptr, flag_ptr, SHIFT: tl.constexpr, DIGITS: tl.constexpr):
    """Find the digit of the k-th largest: the highest digit that enough magnitudes reach. Add it to the state."""
    digit = 255 - tl.arange(0, 256)
    counts = tl.load(counts_ptr + digit)
    prefix, wanted = tl.load(state_ptr), tl.load(state_ptr + 1)
    reached = tl.cumsum(counts, axis=0)
    found = tl.max(tl.where(reached >= wanted, digit, 0), axis=0)
    before = tl.sum(tl.where(digit > found, counts, 0), axis=0)
    tl.store(state_ptr, prefix | (found.to(tl.int64) << SHIFT))
    tl.store(state_ptr + 1, wanted - before)
    if SHIFT + DIGITS == 31:  # the exponent of NaN and Inf is 255
        tl.store(flag_ptr, 1, mask=tl.load(counts_ptr + 255) > 0)


@triton.jit
def count_chosen(
    g_ptr, r_ptr, values_ptr, positions_ptr, ok_ptr, numel, size, state_ptr, above_ptr, ties_ptr,
    HAS_R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the numbers of elements of a tile that are above the threshold and equal to it."""
    ok = tl.load(ok_ptr) != 0
    n = tl.where(ok, size, numel)
    tile = tl.program_id(0)
    if tile.to(tl.int64) * TILE < n:
        threshold = tl.load(state_ptr).to(tl.int32)
        at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        bits = magnitude_bits(read_source(g_ptr, r_ptr, values_ptr, ok, at, n, HAS_R))
        tl.store(above_ptr + tile + 1, tl.sum(((bits > threshold) & (at < n)).to(tl.int32), axis=0).to(tl.int64))
        tl.store(ties_ptr + tile + 1, tl.sum(((bits == threshold) & (at < n)).to(tl.int32), axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["k"])
def gather_chosen(
    g_ptr, r_ptr, values_ptr, positions_ptr, ok_ptr, numel, size, state_ptr, above_ptr, ties_ptr,
    chosen_positions_ptr, chosen_values_ptr, k, HAS_R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write positions and values of all elements above the threshold and of the first ones equal to it, in order."""
    ok = tl.load(ok_ptr) != 0
    n = tl.where(ok, size, numel)
    tile = tl.program_id(0)
    if tile.to(tl.int64) * TILE < n:
        threshold, wanted = tl.load(state_ptr).to(tl.int32), tl.load(state_ptr + 1)
        at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        total = read_source(g_ptr, r_ptr, values_ptr, ok, at, n, HAS_R)
        bits = magnitude_bits(total)
        above, tie = ((bits > threshold) & (at < n)).to(tl.int32), ((bits == threshold) & (at < n)).to(tl.int32)
        ties_before = tl.load(ties_ptr + tile) + tl.cumsum(tie, axis=0) - tie
        slot = tl.load(above_ptr + tile) + tl.cumsum(above, axis=0) - above + tl.minimum(ties_before, wanted)
        chosen = ((above == 1) | ((tie == 1) & (ties_before < wanted))) & (slot < k)
        if ok:  # noqa: SIM108 - a choice of values would read both
            position = tl.load(positions_ptr + at, mask=chosen, other=0)
        else:
            position = at
        tl.store(chosen_positions_ptr + slot, position, mask=chosen)
        tl.store(chosen_values_ptr + slot, total, mask=chosen)
