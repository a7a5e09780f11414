"""No read beyond the end either: buffers stand against pages that must not be touched, where one byte more is a crash.

In a process of its own, since that is how it fails.
"""

import os
from pathlib import Path

import pytest

from processes import run_python

SCRIPT = """
    import ctypes, mmap, sys, torch
    from cases import ALL_SPECS, DTYPES
    import thinwire
    from thinwire import kernels
    from thinwire.kernels.layout import residual_dtype
    from thinwire.kernels.updates import AdamUpdate

    PAGE, libc, keep = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True), []

    def fenced(numel, dtype, end):
        # numel elements that end (or begin) right at a page without access
        size = numel * dtype.itemsize
        pages = size // PAGE + 1
        region = mmap.mmap(-1, (pages + 2) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(region))
        for page in (start, start + (pages + 1) * PAGE):
            assert libc.mprotect(ctypes.c_void_p(page), PAGE, 0) == 0
        at = start + (pages + 1) * PAGE - size if end else start + PAGE
        raw = (ctypes.c_char * size).from_address(at)
        keep[:] = keep[-11:] + [(region, raw)]
        return torch.frombuffer(raw, dtype=dtype)

    generator = torch.Generator().manual_seed(0)
    with kernels.force("cpu"):
        for spec in ALL_SPECS:
            compressor = thinwire.compressor(spec)
            for numel, dtype, end in [
                (1, torch.float32, True), (33, torch.float32, True), (4097, torch.float32, True),
                (9001, torch.float16, True), (9001, torch.float32, False), (8191, torch.float64, True),
            ] + ([(150_001, torch.float32, True)] if "chunk=none" in spec else []):
                tensor, residual = fenced(numel, dtype, end), fenced(numel, residual_dtype(dtype), end)
                out, payload = fenced(numel, dtype, end), fenced(compressor.nbytes(numel, dtype), torch.uint8, end)
                residual = residual if compressor.contracts else None
                tensor.copy_(torch.randn(numel, generator=generator))
                ct = compressor.compress(tensor, residual, key=1, out=payload)
                compressor.accumulate(ct, compressor.decompress(ct, out), 0.5)
                if residual is not None:
                    m, v, update = (fenced(numel, residual.dtype, end) for _ in range(3))
                    v.fill_(1.0)
                    adam = AdamUpdate(m, v, 0.5, 1.0, 1.0, 1e-8, 8.0, 1.0, 0.9)
                    adam.write(tensor, update)
                    wide = compressor.encode(update, residual, key=1)
                    compressor.settle(wide, tensor, residual, wide.payload.repeat(2, 1), 1, 0.5, adam, update)
                    compressor.settle(ct, tensor, residual, ct.payload.repeat(2, 1), 1, 0.5)
                    adam.advance(tensor, residual)
                for content in (None, 0, 0xFF, 0x80):
                    if content is None:
                        payload.random_(0, 256, generator=generator)
                    else:
                        payload.fill_(content)
                    kernel = kernels.select(ct.layout, out.device)[1]
                    kernel.decode(payload.unsqueeze(0), ct.layout, 1, out, 1.0, True)
    print("survived")
    """


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
def test_cpu_kernels_touch_nothing_beyond_their_buffers() -> None:
    assert run_python(SCRIPT, PYTHONPATH=str(Path(__file__).parents[1])) == "survived"
