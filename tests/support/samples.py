"""Valid frames to start from: every compressor, small and odd sizes, all dtypes, marked ones too."""

from functools import cache

import torch
from hypothesis import settings
from hypothesis import strategies as st

import thinwire
from support.cases import ALL_SPECS, BACKENDS, DTYPES, KEY
from support.memory import guarded
from support.oracle import same_bits
from thinwire import CompressedTensor, FrameError, kernels
from thinwire.kernels.layout import Layout

SIZES = (0, 1, 2, 7, 33, 100, 700, 4096, 4097, 9001)
SMALL = [*ALL_SPECS, "topk:ratio=1/8,bits=2,chunk=32", "topk:ratio=1/2,bits=4,chunk=none", "randomk:ratio=1/2"]


def bounded(examples: int) -> settings:
    """The same examples on every run, so that a red CI means that something changed."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


@cache
def sample(spec: str, numel: int, dtype: torch.dtype, marked: bool = False) -> CompressedTensor:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    if marked and numel:
        tensor[numel // 2] = torch.nan
    with kernels.force("reference"):
        return thinwire.compressor(spec).compress(tensor, key=KEY)


samples = st.builds(sample, *map(st.sampled_from, (SMALL, SIZES, DTYPES, (False, False, True))))


def decode_inside(ct: CompressedTensor, weight: float | None = None) -> list[torch.Tensor]:
    """Decode with every backend into the middle of a larger tensor, whose rest must stay as it was."""
    results = []
    for backend in BACKENDS:
        with kernels.force(backend), guarded(ct.numel, ct.dtype) as out:
            out.fill_(0)
            ct.decompress(out) if weight is None else ct.compressor.accumulate(ct, out, weight)
            results.append(out.clone())
    return results


def complaint(payload: torch.Tensor, layout: Layout, backend: str) -> str | None:
    """What the check says against a payload, less the number of the record, which only the quick one knows."""
    with kernels.force(backend):
        try:
            kernels.check(payload, layout)
        except ValueError as error:
            return str(error).split(": ", 1)[-1]
    return None


LARGEST_DECODED = 1 << 16
"""A forged count may ask for terabytes; reading such a frame must work, making the tensor need not."""


def accept_or_refuse(data: bytes, *, decodes: bool = True) -> CompressedTensor | None:
    """The oracle of frames: a `FrameError`, or a frame that packs to the same bytes and decodes in its place."""
    try:
        ct = CompressedTensor.from_bytes(data)
    except FrameError:
        return None
    assert ct.to_bytes() == data, "accepted, but packs to other bytes"
    assert ct.nbytes == ct.compressor.nbytes(ct.numel, ct.dtype)
    if decodes and ct.numel <= LARGEST_DECODED:
        assert same_bits(*decode_inside(ct)), "backends decode an accepted frame differently"
        decode_inside(ct, weight=0.5)
    return ct
