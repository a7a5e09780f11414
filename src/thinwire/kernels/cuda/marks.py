"""The mark, written on the device: the payload of an input that was not finite.

`encode` does not wait for the device, so its kernels set a flag there if they find a NaN or Inf. A kernel of this
module is launched after them. It only reads the flag, unless the flag is set. Then it overwrites every record with the
bytes that the reference writes as the mark.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import Layout
from .launch import launch

_BLOCK = 1024
_PROGRAMS = 256


def mark_if(flag: Tensor, payload: Tensor, reference: Any, pattern: Layout, record_nbytes: int, rows: int) -> None:
    """Overwrite the payload with the mark if the flag is set.

    `pattern` is the layout of one record, which the reference marks, and of the tail after it, if any.
    """
    programs = min(_PROGRAMS, triton.cdiv(payload.numel(), _BLOCK))
    marked = _marked(reference, pattern, payload.device)
    launch(
        mark_records, (programs,), payload, marked, flag, payload.numel(), rows * record_nbytes, max(record_nbytes, 1),
        record_nbytes if rows else 0, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _marked(reference: Any, layout: Layout, device: torch.device) -> Tensor:
    """Return the mark that the reference kernel writes for this layout."""
    payload = torch.empty(layout.nbytes, dtype=torch.uint8)
    reference.mark(layout, payload)
    return payload.to(device)


@triton.jit(do_not_specialize=["nbytes", "full", "record", "tail_at"])
def mark_records(payload_ptr, marked_ptr, flag_ptr, nbytes, full, record, tail_at, BLOCK: tl.constexpr):
    """Copy the mark to the payload if the flag is set.

    Byte i of the first `full` bytes is byte i % record of the mark. The bytes after them are those from `tail_at` on.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    stop = tl.where(tl.load(flag_ptr) != 0, nbytes, 0).to(tl.int64)
    while first < stop:
        at = first + tl.arange(0, BLOCK)
        source = tl.where(at < full, at % record, at - full + tail_at)
        tl.store(payload_ptr + at, tl.load(marked_ptr + source, mask=at < nbytes, other=0), mask=at < nbytes)
        first += tl.num_programs(0) * BLOCK
