"""CPU kernels between pages that must not be touched: prints "survived". python -m support.guard_pages"""

import ctypes
import mmap
from itertools import product
from typing import Any

import torch
from torch import Tensor

import thinwire
from support.cases import ALL_SPECS, has_kernel
from thinwire import kernels
from thinwire.kernels.layout import residual_dtype
from thinwire.kernels.updates import AdamUpdate

PAGE = mmap.PAGESIZE
keep: list[Any] = []


def fenced(numel: int, dtype: torch.dtype, end: bool) -> Tensor:
    """`numel` elements that end, or begin, right at a page without access."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = numel * dtype.itemsize
    pages = size // PAGE + 1
    region = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for page in (start, start + (pages + 1) * PAGE):
        assert libc.mprotect(ctypes.c_void_p(page), PAGE, 0) == 0
    at = start + (pages + 1) * PAGE - size if end else start + PAGE
    raw = (ctypes.c_char * size).from_address(at)
    keep[:] = [*keep[-11:], (region, raw)]
    return torch.frombuffer(raw, dtype=dtype)


ROWS = (
    *((numel, torch.float32, True) for numel in (1, 33, 4097)),
    (9001, torch.float16, True),
    (9001, torch.float32, False),
    (8191, torch.float64, True),
)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    with kernels.force("cpu"):
        for spec, (numel, dtype, end) in product(ALL_SPECS, ROWS):
            compressor = thinwire.compressor(spec)
            if has_kernel(compressor.layout(numel, dtype)):
                tensor, residual = fenced(numel, dtype, end), fenced(numel, residual_dtype(dtype), end)
                out, payload = fenced(numel, dtype, end), fenced(compressor.nbytes(numel, dtype), torch.uint8, end)
                tensor.copy_(torch.randn(numel, generator=generator))
                ct = compressor.compress(tensor, residual, key=1, out=payload)
                compressor.accumulate(ct, compressor.decompress(ct, out), 0.5)
                m, v, update = (fenced(numel, residual.dtype, end) for _ in range(3))
                v.fill_(1.0)
                adam = AdamUpdate(m, v, 0.5, 1.0, 1.0, 1e-8, 8.0, 1.0, 0.9)
                adam.write(tensor, update)
                wide = compressor.encode(update, residual, key=1)
                compressor.apply(wide, tensor, residual, wide.payload.repeat(2, 1), 1, 0.5, adam, update)
                compressor.apply(ct, tensor, residual, ct.payload.repeat(2, 1), 1, 0.5)
                adam.advance(tensor, residual)
                for content in (None, 0, 0xFF, 0x80):
                    if content is None:
                        payload.random_(0, 256, generator=generator)
                    else:
                        payload.fill_(content)
                    kernel = kernels.select(ct.layout, out.device)[1]
                    kernel.decode(payload.unsqueeze(0), ct.layout, out, 1.0, True)
    print("survived")


if __name__ == "__main__":
    main()
