"""A thousand steps need no more memory than ten."""

import gc
import resource
from pathlib import Path

import pytest
import torch

import thinwire
from cases import SPECS
from thinwire import CompressedTensor, kernels

SLACK = 6 << 20


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("backend", "numel", "name"),
    [*(("cpu", 1_000_000, name) for name in SPECS), *(("reference", 5000, name) for name in SPECS)],
)
def test_a_thousand_calls_do_not_grow(backend: str, numel: int, name: str) -> None:
    """The reference is slow, so its tensor is small; the payload in its frame is made and read as well now and then."""
    compressor = thinwire.compressor(SPECS[name][0])
    tensor, residual, total = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)

    def call(key: int) -> None:
        ct = compressor.compress(tensor, residual, key=key)
        compressor.accumulate(ct, total, 0.5)
        if key % 100 == 0:
            CompressedTensor.from_bytes(ct.to_bytes())

    with kernels.force(backend):
        for key in range(20):
            call(key)
        before = resident()
        for key in range(1000):
            call(key)
        grown = resident() - before
    assert grown < SLACK, f"{compressor}, {backend}: grew by {grown / 2**20:.1f} MiB in 1,000 calls"
