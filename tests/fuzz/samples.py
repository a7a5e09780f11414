"""Valid frames to start from: every compressor, small and odd sizes, all dtypes, marked ones too."""

from functools import cache

import torch
from hypothesis import settings
from hypothesis import strategies as st

import thinwire
from cases import ALL_SPECS, BACKENDS, DTYPES, KEY
from guard import guarded
from thinwire import CompressedTensor, kernels

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


samples = st.builds(
    sample,
    st.sampled_from(SMALL),
    st.sampled_from(SIZES),
    st.sampled_from(DTYPES),
    st.sampled_from([False, False, True]),
)


def decode_inside(ct: CompressedTensor, *, weight: float | None = None) -> list[torch.Tensor]:
    """Decode with every backend into the middle of a larger tensor, whose rest must stay as it was."""
    results = []
    for backend in BACKENDS:
        with kernels.force(backend), guarded(ct.numel, ct.dtype) as out:
            out.fill_(0)
            if weight is None:
                ct.decompress(out)
            else:
                ct.compressor.accumulate(ct, out, weight)
            results.append(out.clone())
    return results
